"""``offload_activations``: what forward saves for backward, in host memory or on disk."""

import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from tensorstow.activations.pool import ActivationBytes, ActivationPool, check_version
from tensorstow.activations.saved import (
    KeptTensor,
    SavedTensor,
    StorageIdentity,
    address_of,
    version_of,
)
from tensorstow.base.directories import choose_directory, make_directories
from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.sizes import format_bytes, parse_size
from tensorstow.io.device_link import is_remote

logger = logging.getLogger("tensorstow")

Saved = SavedTensor | KeptTensor

DEFAULT_RAM_BUDGET = 256 << 20
"""Host memory for saved tensors on disk, in bytes, where nothing is said."""
LEAST_BYTES = 32 << 10
"""Storages below this stay: moving them costs more than they hold."""


def offload_activations(
    model: nn.Module,
    *,
    to: Literal["host", "disk"],
    ram_budget: str | int | None = None,
    dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),  # noqa: A002
    units: Iterable[nn.Module] | None = None,
) -> "ActivationOffload":
    """Keep what a model's forward saves for backward outside of where it was computed.

    Works by autograd's hooks for saved tensors, in any training loop. Bits and dtypes are those of
    training without it. Parameters, gathered ones too, tensors below 32 KiB and tensors that are
    no plain strided ones stay where they are. With ``torch.utils.checkpoint`` inside the model
    (``use_reentrant=False``) what is saved, and moved, are the inputs of what is checkpointed.

    Args:
        model: The model. Saved by its forward means also by the forwards of its parts.
        to: "host": tensors of an accelerator go to pinned host memory (those of the CPU are
            there). "disk": they go on to scratch files.
        ram_budget: Host memory that saved tensors may take with ``to="disk"``, as "256MiB" or in
            bytes. A tensor that is larger than it passes through alone, and what one operation of
            backward needs is there together. Default: 256 MiB.
        dir: A directory for the scratch files, or several; one that is missing is made. Default:
            the first that is on a real disk of $TMPDIR, /var/tmp, ~/.cache and the working
            directory.
        units: Parts of ``model`` whose forwards alone are meant. Default: all of it.

    Returns:
        What holds them: ``close()`` takes the hooks off the model. It is a context manager that
        does so at the end of its block.

    Raises:
        OptionError: The options contradict each other, or a unit is not in the model.
        DirectoryError: A directory cannot be made, or is read-only, in RAM or full.
    """
    return ActivationOffload(model, to, ram_budget, _paths(dir), units)


class ActivationOffload:
    """Hooks on a model, and the pool that its saved tensors are in."""

    def __init__(
        self,
        model: nn.Module,
        to: Literal["host", "disk"],
        ram_budget: str | int | None,
        directories: Sequence[Path],
        units: Iterable[nn.Module] | None,
    ) -> None:
        """Put hooks on the model; ``offload_activations`` has the arguments."""
        modules = [model] if units is None else list(units)
        _check(model, to, ram_budget, directories, modules)
        budget = None
        if to == "disk":
            given = DEFAULT_RAM_BUDGET if ram_budget is None else ram_budget
            budget = parse_size(given, "ram_budget")
            directories = [facts.path for facts in make_directories(directories)]
            directories = directories or [_chosen_directory()]
        self._pool = ActivationPool(budget, directories, to_disk=to == "disk")
        self._moves_cpu = to == "disk"
        self._parameters: dict[int, StorageIdentity] = {}
        """Storages of parameters in this forward, by their addresses in torch."""
        self._entered = threading.local()
        self._kept: Counter[str] = Counter()
        self._forwards = 0
        self._is_closed = False
        # The model has the hooks, so this goes when the model and its last graph do.
        self._finalizer = weakref.finalize(self, _close_pool, self._pool, os.getpid())
        self._handles: list[RemovableHandle] = []
        if model not in modules:
            # Several units of one forward save the same storage; it is moved once.
            self._handles += [
                model.register_forward_pre_hook(partial(_apart_from_graphs, self._enter_model)),
                model.register_forward_hook(
                    partial(_apart_from_graphs, self._leave_model), always_call=True
                ),
            ]
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(partial(_apart_from_graphs, self._enter)),
                module.register_forward_hook(
                    partial(_apart_from_graphs, self._leave), always_call=True
                ),
            ]
            for part in module.modules():
                self._handles.append(part.register_forward_pre_hook(self._note_parameters))

    def nbytes(self) -> ActivationBytes:
        """Return what saved tensors hold now, and what was moved so far."""
        return self._pool.nbytes()

    def close(self) -> None:
        """Take the hooks off and let memory and files go. Idempotent.

        Graphs whose backward did not run yet cannot run it any more.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._is_closed = True
        stack = self._stack()
        while (
            stack
        ):  # inside of a forward, or behind one that Ctrl-C ended: torch runs no hook then
            hooks = stack.pop()[1]
            if hooks is not None and (_hooks_in_force() or (None,))[0] == self._pack:
                hooks.__exit__()
        self._finalizer.detach()
        self._pool.close()

    def __deepcopy__(self, memo: object) -> "ActivationOffload":
        """Return what moves nothing: a copied model keeps what its forward saves."""
        return _closed()

    def __reduce__(self) -> tuple[Any, ...]:
        """Be pickled as what moves nothing, with the model."""
        return _closed, ()

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # --- hooks of modules ---

    def _enter_model(self, model: nn.Module, _: object) -> None:
        del model
        if not self._is_closed:  # of a copied model
            self._entered.is_in_model = True
            self._begin_forward()

    def _leave_model(self, *_: object) -> None:
        self._entered.is_in_model = False

    def _enter(self, module: nn.Module, _: object) -> None:
        if self._is_closed:  # of a copied model
            return
        stack = self._stack()
        top = _hooks_in_force()
        if stack and any(hooks is not None for _, hooks in stack):
            stack.append((module, None))  # a unit in a unit
            return
        if top is not None:
            message = (
                "offload_activations: other hooks for saved tensors are in force"
                f" ({getattr(top[0], '__qualname__', top[0])}), and torch calls only the innermost"
                " ones. Leave out the other (save_on_cpu, a trainer's activation offload), or with"
                " torch.utils.checkpoint give units= that are not inside of what it recomputes."
            )
            raise OptionError(message)
        if not stack and not getattr(self._entered, "is_in_model", False):
            self._begin_forward()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()  # before parameters are looked at: torch.func, which has others, refuses
        stack.append((module, hooks))
        for part in module.modules():
            self._note_parameters(part, ())

    def _leave(self, module: nn.Module, *_: object) -> None:
        stack = self._stack()
        if not stack or stack[-1][0] is not module:
            return  # forward failed before ``_enter``
        hooks = stack.pop()[1]
        if hooks is not None:
            hooks.__exit__()

    def _stack(self) -> list[tuple[nn.Module, saved_tensors_hooks | None]]:
        """Return the forwards that this thread is in."""
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        found: list[tuple[nn.Module, saved_tensors_hooks | None]] = self._entered.stack
        return found

    def _note_parameters(self, module: nn.Module, _: object) -> None:
        if self._is_closed:
            return
        # A unit of FSDP2 has gathered its parameters by now, and its forward may use those of
        # parts that it does not call.
        for parameter in module.parameters(recurse=_is_fsdp_unit(module)):
            storage = parameter.untyped_storage()
            if address_of(storage) not in self._parameters:
                self._parameters[address_of(storage)] = StorageIdentity(storage)

    def _begin_forward(self) -> None:
        self._pool.start()
        known = list(self._parameters.items())  # another thread may be in a forward too
        self._parameters = {k: ref for k, ref in known if not ref.is_gone()}
        self._forwards += 1
        if self._forwards == 2:  # one forward was seen whole
            logger.info(
                "saved activations: %s were moved per forward; %s stayed",
                format_bytes(self._kept["moved"]),
                ", ".join(
                    f"{format_bytes(nbytes)} of {what}"
                    for what, nbytes in sorted(self._kept.items())
                    if what != "moved"
                )
                or "none",
            )

    # --- hooks of saved tensors ---

    def _pack(self, tensor: torch.Tensor) -> Saved:
        tensor = tensor.detach()
        if self._is_closed:  # in the middle of a forward, or of one that was interrupted
            return KeptTensor(tensor, version_of(tensor))
        reason = self._reason_to_keep(tensor)
        if self._forwards == 1:
            nbytes = tensor.nbytes if tensor.layout == torch.strided else 0
            self._kept["moved" if reason is None else reason] += nbytes
        return KeptTensor(tensor, version_of(tensor)) if reason else self._pool.save(tensor)

    def _reason_to_keep(self, tensor: torch.Tensor) -> str | None:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return "tensors of other kinds"
        if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            return "tensors of other kinds"
        if not (tensor.is_cpu or is_remote(tensor)) or _has_no_memory(tensor):
            return "tensors of other kinds"
        if tensor.is_cpu and not self._moves_cpu:
            return "tensors that are in host memory"
        storage = tensor.untyped_storage()
        if address_of(storage) in self._parameters:
            return "parameters"
        return "small tensors" if storage.nbytes() < LEAST_BYTES else None

    def _unpack(self, saved: Saved) -> torch.Tensor:
        if isinstance(saved, KeptTensor):
            check_version(saved.tensor, saved.version)
            return saved.tensor
        backward = _current_backward()
        if backward >= 0:  # somebody may also look at it
            if saved.backward not in {None, backward}:
                message = (
                    "A second backward pass over one graph was asked for: saved activations that"
                    " were offloaded are there for one. Run forward again, or leave out"
                    " offload_activations."
                )
                raise StowError(message)
            saved.backward = backward
        return self._pool.load(saved)


def _apart_from_graphs(hook: Callable[..., None], *given: Any) -> None:  # noqa: ANN401
    """Call a hook of a module, where torch compiles between two graphs, so that it is in force."""
    if torch.compiler.is_dynamo_compiling():
        _untraced(hook, *given)
    else:  # to ask the compiler would load it, which takes a second and 100 MiB
        hook(*given)


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def _untraced(hook: Callable[..., None], *given: Any) -> None:  # noqa: ANN401
    hook(*given)


def _close_pool(pool: ActivationPool, owner: int) -> None:
    if os.getpid() == owner:  # a child has the file, and its parent's reads and writes in it
        pool.close()


def _closed() -> ActivationOffload:
    """Return the hooks of a model that was copied or loaded: closed, and without a pool's files."""
    logger.warning(
        "a model with offload_activations was copied or loaded: the copy keeps its saved tensors"
        " where they are. Call offload_activations for it, or close() before copying."
    )
    model = nn.Identity()
    offload = ActivationOffload(model, "host", None, (), None)
    offload.close()
    return offload


def _hooks_in_force() -> tuple[Any, Any] | None:
    """Return the hooks for saved tensors that this thread entered last."""
    found: tuple[Any, Any] | None
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003, SLF001
    return found


def _is_fsdp_unit(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever shards has imported it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a wrapper of torch.func, or zeros that torch never wrote."""
    is_wrapper: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001
    return is_wrapper or tensor._is_zerotensor()  # noqa: SLF001


def _current_backward() -> int:
    """Return the number of the backward pass that this thread is in, or -1."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001


def _chosen_directory() -> Path:
    facts = choose_directory()
    logger.warning(
        "saved activations go to scratch files in %s (%s on %s, %s free); name a directory to"
        " choose another place",
        facts.path,
        facts.filesystem,
        facts.device,
        format_bytes(facts.free_bytes),
    )
    return facts.path


def _paths(
    given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[Path]:
    several = [given] if isinstance(given, str | os.PathLike) else given
    return [Path(path).expanduser() for path in several]


def _check(
    model: nn.Module,
    to: str,
    ram_budget: str | int | None,
    directories: Sequence[Path],
    modules: Sequence[nn.Module],
) -> None:
    if to not in {"host", "disk"}:
        message = f"to={to!r} was given; activations go to 'host' or 'disk'."
        raise OptionError(message)
    if to == "host" and (ram_budget is not None or directories):
        message = 'ram_budget and dir are for to="disk". Leave them out, or say to="disk".'
        raise OptionError(message)
    if not modules:
        message = "units=[] was given, which offloads nothing. Name units, or leave it out."
        raise OptionError(message)
    inside = set(model.modules())
    for module in modules:
        if module not in inside:
            message = f"A unit ({type(module).__name__}) was given that is not in the model."
            raise OptionError(message)
