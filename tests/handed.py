"""Which modules of the source are handed a gradient, between autograd's hook and the new weight.

How it counts. Every weight has gradients of one number that nothing else has, so its gradient is
known in any memory that it is copied to. While backward and ``step()`` run, a module is handed the
gradient where one of its functions gets it as an argument, alone or within a list, a dict or a
dataclass; where one gets it as the result of a call; and where one is a hook, which torch calls
with a parameter that has it in ``.grad``. ``self`` does not count: what an object keeps it was
handed before. The second step is counted: what the first one alone makes is no part of the way.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed.fsdp
from torch import nn

import tensorstow
from tensorstow.fsdp.gradient_offload import HostGradient, HostSum
from tensorstow.optim.stowed_adam import StowedAdam

SOURCE = Path(tensorstow.__file__).parent
_FSDP = str(Path(torch.distributed.fsdp.__file__).parent)
WIDTH = 8
NUMBERS = (0.3125, 0.4375, 0.5625)
"""Of the gradients of the three weights, before they are doubled by what comes in."""
_DEPTH = 3


class Parallel(nn.Module):
    """Layers side by side, so that each weight's gradient is a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in NUMBERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(NUMBERS, self.layers, strict=True)
        return torch.stack([number * layer(x).sum() for number, layer in pairs]).sum()


class Handed:
    """The modules that were handed each gradient, by the number that it is made of."""

    def __init__(self, settle: Callable[[], None]) -> None:
        """``settle``: waits until copies between devices are over."""
        self._settle = settle
        self._is_on = False
        self.modules: dict[float, set[str]] = {2 * number: set() for number in NUMBERS}

    def watch(self, act: Callable[[], object]) -> None:
        """Count while ``act`` runs, in the threads where ``note`` is the profile's function."""
        self._is_on = True
        try:
            act()
        finally:
            self._is_on = False

    def note(self, frame: FrameType, event: str, result: object) -> None:
        """Look at a call, or at what it returns; for ``sys.setprofile``."""
        if not self._is_on or not _is_ours(frame):
            return
        caller = _caller_of(frame)
        if event == "call":
            code = frame.f_code
            count = code.co_argcount + code.co_kwonlyargcount
            for name in code.co_varnames[:count]:
                value = frame.f_locals.get(name)
                if name not in {"self", "cls"}:
                    self._count(frame, value)
                    if caller is None and isinstance(value, torch.Tensor) and value.is_leaf:
                        self._count(frame, value.grad)
        elif event == "return" and caller is not None:
            self._count(caller, result)

    def _count(self, frame: FrameType, value: object) -> None:
        module = str(Path(frame.f_code.co_filename).relative_to(SOURCE).with_suffix(""))
        for found in self._numbers_in(value, _DEPTH):
            if found in self.modules:
                self.modules[found].add(module)

    def _numbers_in(self, value: object, depth: int) -> Iterator[float]:
        if isinstance(value, torch.Tensor):
            yield from self._numbers_of(value)
        elif isinstance(value, HostSum):
            yield from self._numbers_of(value.memory)
        elif depth and not isinstance(value, type):
            for part in _parts_of(value):
                yield from self._numbers_in(part, depth - 1)

    def _numbers_of(self, tensor: torch.Tensor) -> Iterator[float]:
        local = getattr(tensor, "_local_tensor", tensor)
        if isinstance(local, HostGradient):
            local = local.host.memory
        plain = type(local) in {torch.Tensor, nn.Parameter} and local.is_floating_point()
        if plain and local.numel() and not local.is_meta and local.untyped_storage().nbytes():
            self._settle()
            yield float(local.detach().flatten()[0])


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(SOURCE))


def _caller_of(frame: FrameType) -> FrameType | None:
    """Return the function of ours that this one was called for, past torch's; None for a hook.

    What FSDP2 calls is a hook of its own, whoever has called FSDP2.
    """
    caller = frame.f_back
    while caller is not None and not _is_ours(caller):
        if caller.f_code.co_filename.startswith(_FSDP):
            return None
        caller = caller.f_back
    return caller


def _parts_of(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple | set | deque):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
    elif is_dataclass(value):
        yield from (getattr(value, field.name, None) for field in fields(value))


def modules_handed_a_gradient(
    make: Callable[[], tuple[nn.Module, StowedAdam]],
    device: torch.device | None = None,
    settle: Callable[[], None] = lambda: None,
) -> set[str]:
    """Return the modules that are handed one gradient: of the three the one that meets most.

    ``make`` returns a ``Parallel``, on ``device``, and its optimizer; it is trained for two steps.
    """
    model, optimizer = make()
    x = torch.full((1, WIDTH), 2.0, device=device)
    handed = Handed(settle)

    def step() -> None:
        loss = model(x)
        # In the thread of autograd's that calls the hooks, which for an accelerator is not ours.
        loss.register_hook(lambda _: sys.setprofile(handed.note))
        before = sys.getprofile()
        sys.setprofile(handed.note)
        try:
            loss.backward()
            optimizer.step()
            optimizer.wait()
        finally:
            sys.setprofile(before)
            ended = torch.ones((), device=device, requires_grad=True) * 1.0
            ended.register_hook(lambda _: sys.setprofile(before))
            ended.backward()
        optimizer.zero_grad()

    step()
    handed.watch(step)
    optimizer.close()
    return max(handed.modules.values(), key=len)
