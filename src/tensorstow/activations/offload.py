"""``offload_activations``: tensors saved for backward, in host memory or on disk."""

import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
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
from tensorstow.base.directories import make_directories, read_paths
from tensorstow.base.errors import OptionError, StowError, abbreviated
from tensorstow.base.fields import read_value
from tensorstow.base.keywords import names_keywords, warn_renamed
from tensorstow.base.sizes import format_bytes, parse_size
from tensorstow.base.tiers import Tier
from tensorstow.io.device_link import is_remote
from tensorstow.states.scratch import choose_scratch

logger = logging.getLogger("tensorstow")

Saved = SavedTensor | KeptTensor

_OF_MODEL: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[ActivationOffload]]" = (
    weakref.WeakKeyDictionary()
)
DEFAULT_RAM_BUDGET = 256 << 20
"""Default host memory for saved tensors on disk, in bytes."""
LEAST_BYTES = 32 << 10
"""Smaller storages are not moved: moving them costs more than it saves."""


@names_keywords
def offload_activations(
    model: nn.Module,
    *,
    to: Literal["host", "cpu", "ram", "disk", "nvme"],
    ram_budget: str | int | None = None,
    dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),  # noqa: A002
    units: Iterable[nn.Module] | None = None,
) -> "ActivationOffload":
    """Move the tensors that a model's forward saves for backward to host memory or disk.

    It uses autograd's hooks for saved tensors and works in any training loop. Bits and dtypes are
    those of training without it. Parameters (also gathered ones), tensors below 32 KiB and tensors
    that are not plain strided ones are not moved. With ``torch.utils.checkpoint`` inside the model
    (``use_reentrant=False``), the inputs of the checkpointed parts are saved and moved.

    Args:
        model: The model. Its forward includes the forwards of its parts.
        to: "host" (or "cpu", "ram"): tensors of an accelerator move to pinned host memory (those of
            the CPU stay). "disk" (or "nvme"): they move on to scratch files.
        ram_budget: Host memory that saved tensors may take with ``to="disk"``, as "256MiB" or in
            bytes. A larger tensor passes through alone, and all tensors that one operation of
            backward needs are in memory together. Default: 256 MiB.
        dir: A directory for the scratch files, or several; missing ones are created. Default: the
            first of $TMPDIR, /var/tmp, ~/.cache and the working directory that is on a real disk.
        units: Parts of ``model``: only tensors that their forwards save are moved. Default: all.

    Returns:
        An object whose ``close()`` removes the hooks from the model. It is a context manager that
        closes at the end of its block.

    Raises:
        OptionError: The options contradict each other, or a unit is not in the model; in forward:
            other hooks for saved tensors are in force.
        DirectoryError: A directory cannot be created, or is read-only, in RAM or full.
        StowError: In backward: it is the second one over the same graph.
    """
    return ActivationOffload(
        model, _named(to), ram_budget, read_paths(None if dir == () else dir, "dir"), units
    )


def activations_of(model: nn.Module) -> list[ActivationBytes]:
    """Return the bytes of each offload of a model, or of the model that a wrapper holds."""
    offloads = (offload for module in model.modules() for offload in _OF_MODEL.get(module, ()))
    return [offload._pool.nbytes() for offload in offloads]  # noqa: SLF001  # its own


class ActivationOffload:
    """Hooks on a model, and the pool that its saved tensors are in."""

    def __init__(
        self,
        model: nn.Module,
        to: str,
        ram_budget: str | int | None,
        directories: Sequence[Path],
        units: Iterable[nn.Module] | None,
    ) -> None:
        modules = [model] if units is None else _list_units(units)
        _check(model, to, ram_budget, directories, modules)
        budget = None
        if to == "disk":
            size = DEFAULT_RAM_BUDGET if ram_budget is None else ram_budget
            budget = parse_size(size, "ram_budget")
            directories = [facts.path for facts in make_directories(directories)]
            directories = directories or [choose_scratch("saved activations")]
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
        self._of_model = _OF_MODEL.setdefault(model, weakref.WeakSet())
        self._of_model.add(self)
        if model not in modules:
            # Several units of one forward save the same storage; it is moved once.
            self._register(model, self._enter_model, self._leave_model)
        for module in modules:
            self._register(module, self._enter, self._leave)
            for part in module.modules():
                # At each call: a unit of FSDP2 has its gathered parameters only then.
                self._handles.append(part.register_forward_pre_hook(self._note_parameters))

    def nbytes(self) -> ActivationBytes:
        """Return ``tensorstow.usage(model).activations``, which it is the old name of."""
        warn_renamed("offload.nbytes()", "tensorstow.usage(model).activations")
        return self._pool.nbytes()

    def close(self) -> None:
        """Remove the hooks and free memory and files. Idempotent.

        Graphs whose backward did not run yet cannot run it after this.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._is_closed = True
        self._of_model.discard(self)
        stack = self._stack()
        while stack:  # in a forward, or after one that Ctrl-C ended, when torch runs no hook
            hooks = stack.pop()[1]
            # torch removes the innermost hooks, whoever's they are.
            if hooks is not None and (_hooks_in_force() or (None,))[0] == self._pack:
                hooks.__exit__()
        self._finalizer.detach()
        self._pool.close()

    def __deepcopy__(self, memo: object) -> "ActivationOffload":
        """Return a closed object: the forward of a copied model moves nothing."""
        return _closed()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a closed object, with the model."""
        return _closed, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- hooks of modules ---

    def _register(
        self, module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
    ) -> None:
        before, after = partial(apart_from_graphs, enter), partial(apart_from_graphs, leave)
        self._handles.append(module.register_forward_pre_hook(before))
        # Called after an error in forward too, which would leave the hooks in force.
        self._handles.append(module.register_forward_hook(after, always_call=True))

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
                " torch.utils.checkpoint name units= that it does not recompute."
            )
            raise OptionError(message)
        if not stack and not getattr(self._entered, "is_in_model", False):
            self._begin_forward()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()  # first: with torch.func it raises an error
        stack.append((module, hooks))
        for part in module.modules():
            self._note_parameters(part, ())

    def _leave(self, module: nn.Module, *_: object) -> None:
        stack = self._stack()
        if not stack or stack[-1][0] is not module:
            return  # forward raised an error before ``_enter``
        hooks = stack.pop()[1]
        if hooks is not None:
            hooks.__exit__()

    def _stack(self) -> list[tuple[nn.Module, saved_tensors_hooks | None]]:
        """Return the forwards that this thread is in."""
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        stack: list[tuple[nn.Module, saved_tensors_hooks | None]] = self._entered.stack
        return stack

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
        storages = list(self._parameters.items())  # a copy: other threads' forwards add to it
        self._parameters = {k: ref for k, ref in storages if not ref.is_gone()}
        self._forwards += 1
        if self._forwards == 2:  # one forward is complete
            logger.info(
                "saved activations: %s were moved per forward; %s stayed",
                format_bytes(self._kept["moved"]),
                ", ".join(
                    f"{format_bytes(nbytes)} of {reason}"
                    for reason, nbytes in sorted(self._kept.items())
                    if reason != "moved"
                )
                or "none",
            )

    # --- hooks of saved tensors ---

    def _pack(self, tensor: torch.Tensor) -> Saved:
        tensor = tensor.detach()
        if self._is_closed:  # during a forward, or after one that was interrupted
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
        backward = int(torch._C._current_graph_task_id())  # noqa: SLF001
        if backward >= 0:  # -1: a user reads it outside backward
            if saved.backward not in {None, backward}:
                message = (
                    "A second backward pass over the same graph was called: offloaded activations"
                    " last for one pass. Run forward again, or leave out offload_activations."
                )
                raise StowError(message)
            saved.backward = backward
        return self._pool.load(saved)


def apart_from_graphs(hook: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
    """Call a hook of a module; if torch compiles, between two graphs, so that it takes effect."""
    if torch.compiler.is_dynamo_compiling():
        _untraced(hook, *args)
    else:  # disabling the compiler would load it, which takes a second and 100 MiB
        hook(*args)


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def _untraced(hook: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
    hook(*args)


def _close_pool(pool: ActivationPool, owner: int) -> None:
    if os.getpid() == owner:  # a forked child shares the file and its parent's transfers
        pool.close()


def _closed() -> ActivationOffload:
    """Return closed hooks for a model that was copied or loaded."""
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
    hooks: tuple[Any, Any] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003, SLF001
    return hooks


def _is_fsdp_unit(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported if anything is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a wrapper of torch.func, or zeros that torch never wrote."""
    is_wrapper: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001
    return is_wrapper or tensor._is_zerotensor()  # noqa: SLF001


def _named(to: str) -> str:
    """Return the tier that ``to`` is a name of, else ``to``."""
    tier = Tier.named(to)
    return to if tier is None else tier.value


def _list_units(units: Iterable[object]) -> list[nn.Module]:
    modules = []
    try:
        for unit in units:
            if not isinstance(unit, nn.Module):
                message = f"units= has {abbreviated(unit)}, which is not a module. Give modules."
                raise OptionError(message)
            modules.append(unit)
    except TypeError as error:
        message = f"units={abbreviated(units)} was given. Give a list of modules of the model."
        raise OptionError(message) from error
    return modules


def _check(
    model: nn.Module,
    to: str,
    ram_budget: str | int | None,
    directories: Sequence[Path],
    modules: Sequence[nn.Module],
) -> None:
    read_value(Literal["host", "disk"], to, "to")
    if to == "host" and (ram_budget is not None or directories):
        message = 'ram_budget and dir are for to="disk". Leave them out, or use to="disk".'
        raise OptionError(message)
    if not modules:
        message = "units=[] was given, which offloads nothing. Name units, or leave it out."
        raise OptionError(message)
    inside = set(model.modules())
    for module in modules:
        if module not in inside:
            message = f"units= has a {type(module).__name__} that is not a module of the model."
            raise OptionError(message)
