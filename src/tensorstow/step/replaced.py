"""Detects weights and gradients that were replaced, or that were written or freed during an update.

[Note: Replaced] The pipeline writes to the memory that weights have when a step begins. It keeps
that alive until the update is done. Reads of a parameter wait ([Note: Unpublished]), but not writes
to tensors that share its memory since before ``step()``, or through the shard of a DTensor. Such
values may be lost or old, so they are an error when the update is over. Memory that was freed
in place cannot be kept alive: this is reported only.

[Note: Other parameters] A module may get another parameter in the place of one that the optimizer
has: by ``load_state_dict(assign=True)``, ``fully_shard``, or an assignment. The new one would never
be trained, and a commit would keep the old one. A step looks at the places that had the
parameters, and by name if one has another, or if the number of gradients changed. FSDP2 puts whole
parameters, which are no DTensors, in the place of its own while a unit is unsharded.

[Note: Aliases] A read of a parameter waits for its update ([Note: Unpublished]); a read through a
view or NumPy array that was taken before ``step()`` cannot. Each of these holds the storage of the
parameter, and torch counts its holders. So the update of a parameter whose storage has holders that
are not ours runs inside of ``step()``. A graph of autograd that is still alive, or an object that
waits for the garbage collector, holds it too: then ``step()`` waits without need. The same is true
of a gradient, which something else may rewrite during the update, as DDP its buckets.

Memory that processes share has other readers too. Not found are raw addresses, storages that are
held without a tensor, an array of which a parameter was made by ``torch.from_numpy``, views of
moments, what reads the shard of a DTensor, whose storage FSDP2 holds itself, and, in a step that
began in backward, aliases of weights on an accelerator.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.tiers import Tier
from tensorstow.step.managed_param import ManagedParam, ParamUpdate
from tensorstow.tensors.dtensor import PLAIN_TENSORS, is_in_storage, layout_of, shard_of
from tensorstow.tensors.placeholder import ConsumedGradient

_WAY_OUT = (
    ' Call optimizer.wait() first, or use overlap="none"; resume() goes back to the last commit of'
    " a run that has dir=."
)


class ModuleParameters:
    """The parameters of an optimizer that ``module=`` has, by name ([Note: Other parameters])."""

    def __init__(self, module: torch.nn.Module | None) -> None:
        """Begin with no parameters of ``module``; None: nothing is checked."""
        self._module = module
        self._known: dict[int, torch.Tensor] = {}
        """All parameters that were added, by id."""
        self._names: dict[str, torch.Tensor] = {}
        """Those that the module has, by each of their names."""
        self._places: list[tuple[dict[str, torch.nn.Parameter | None], str, torch.Tensor]] = []
        """The same: the parameters of a part of the module, the name in the part, and which."""
        self._gradients = -1
        """The number of gradients in the last step; -1: the next step looks in any case."""

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Check ``parameters`` too from now on, if the module has them."""
        new = {id(p): p for p in parameters if id(p) not in self._known}
        if new:
            self._known.update(new)
            self._names.update({n: p for n, p in self._current().items() if id(p) in new})
            for part in () if self._module is None else self._module.modules():
                of_part = part._parameters  # noqa: SLF001  # no public way to look without a copy
                self._places += [
                    (of_part, n, p) for n, p in of_part.items() if id(p) in new and p is not None
                ]
            self._gradients = -1

    def check_step(self, gradients: int) -> None:
        """Check before a step of so many gradients.

        Skipped if the last step had as many, and some, and each part has the parameters it had: a
        part that was exchanged whole keeps its own, and its old ones get no gradients any more.
        """
        is_moved = any(of_part.get(name) is not p for of_part, name, p in self._places)
        if is_moved or gradients == 0 or gradients != self._gradients:
            self.check()
            self._gradients = gradients

    def check(self) -> None:
        """Raise OptionError if the module has another parameter in the place of one."""
        current = self._current()
        ids = {id(p) for p in current.values()}
        for name, parameter in self._names.items():
            other = current.get(name)
            if other is parameter:
                continue
            if layout_of(parameter) is None:
                # A parameter that has only lost this name is still trained under another.
                is_replaced = other is not None or id(parameter) not in ids
            else:
                is_replaced = other is not None and layout_of(other) is not None
            if is_replaced:
                message = (
                    f"{name} of module= ({type(self._module).__name__}) is not the parameter that"
                    " the optimizer has: it was replaced or removed after you created the"
                    " optimizer, as load_state_dict(assign=True), fully_shard and an assignment"
                    " do. Steps would not train it. Create the optimizer after that."
                )
                raise OptionError(message)

    def _current(self) -> dict[str, torch.Tensor]:
        if self._module is None:
            return {}
        return dict(self._module.named_parameters(remove_duplicate=False))


@dataclass(eq=False, slots=True)
class UpdateUnderWay:
    """An update that runs on after ``step()``, and what must not change until it is over."""

    update: ParamUpdate
    parts: Sequence[torch.Tensor] = field(default=(), init=False)
    """The gradient in ``.grad`` and the states in memory, if their uses wait too."""
    version: int = field(init=False)
    """The version of the gradient when the update began."""
    memory: torch.Tensor = field(init=False)
    """Shares the weight's memory, and keeps it if the parameter gets another."""
    nbytes: int = field(init=False)
    """Bytes of the weight's storage."""

    def __post_init__(self) -> None:
        """Record the gradient and the weight as they are now."""
        self.version = self._version()
        self.memory = self.update.param.parameter.detach()
        self.nbytes = self.memory.untyped_storage().nbytes()

    def find_parts(self) -> None:
        """Find what users see of the update beside its weight."""
        param = self.update.param
        parts: list[torch.Tensor] = [t for t in param.views.values() if type(t) in PLAIN_TENSORS]
        # In a storage of ours the gradient has a class of its own, which stays.
        if self.update.gradient is not None and not is_in_storage(param.owner):
            gradient = param.owner.grad
            if gradient is not None and not isinstance(gradient, ConsumedGradient):
                read = _key(self.update.gradient)
                if type(gradient) not in PLAIN_TENSORS or _key(gradient) == read:  # else a copy
                    parts.append(gradient)
        self.parts = parts

    def check(self) -> None:
        """Raise OptionError if the gradient or the weight was changed during the update."""
        if self._version() != self.version:
            message = (
                "A gradient was changed in place after step(), while its update was still reading"
                " it, for example by a backward that added to it. Call optimizer.zero_grad() after"
                " step(), or optimizer.wait() before the change."
            )
            raise OptionError(message)
        param = self.update.param
        if self.memory.untyped_storage().nbytes() < self.nbytes:
            raise refusal(param, "was freed in place (by resize_ of its storage)")
        # A read of a weight in a storage would wait for this check.
        if not is_in_storage(param.owner) and _now(param).data_ptr() != self.memory.data_ptr():
            raise refusal(param, "was replaced by other memory")
        if param.written_by_others:
            raise refusal(param, "was written")

    def release_gradient(self) -> None:
        """Stop holding the gradient, which was read; ``check`` still reports earlier changes."""
        if self._version() == self.version:
            self.update, self.version = self.update._replace(gradient=None), 0

    def _version(self) -> int:
        gradient = self.update.gradient
        return 0 if gradient is None else gradient._version  # noqa: SLF001


def _now(param: ManagedParam) -> torch.Tensor:
    if param.owner is param.parameter:
        return param.parameter
    with torch.no_grad():
        return shard_of(param.owner)


def refusal(param: ManagedParam, change: str) -> OptionError:
    """Return the error for a weight that was changed during its update."""
    message = (
        f"A weight of shape {tuple(param.owner.shape)} {change} between step() and the wait for"
        " its update, which this overlap= lets run on: the parameter may hold values from before"
        f" the update.{_WAY_OUT}"
    )
    return OptionError(message)


# --- aliases ---


def may_have_aliases(param: ManagedParam) -> bool:
    """Return whether users can have tensors on the memory of a weight: storages of ours wait."""
    owner = param.owner
    return owner is param.shard and layout_of(owner) is None and not is_in_storage(owner)


def shared_elsewhere(updates: Sequence[ParamUpdate], params: Iterable[ManagedParam]) -> list[int]:
    """Return ids of the parameters of ``updates`` that others may read or write unnoticed.

    Args:
        updates: Updates of parameters that ``may_have_aliases``. No feed of an accelerator has
            begun them: it shares the memory of what it copies.
        params: All parameters of the optimizer, which may share storages with each other.
    """
    # A read of a weight may wait or undo its update, and this is none.
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        shared = [u for u in updates if _is_shared(u.param, 1) or _is_rewritten(u, 1)]
        if not shared:
            return []
        siblings = _siblings(p.owner for p in params if may_have_aliases(p))
        gradients = _siblings(u.gradient for u in updates if u.gradient is not None)
        return [
            id(u.param.owner)
            for u in shared
            if _is_shared(u.param, siblings[_key(u.param.owner)])
            or (u.gradient is not None and _is_rewritten(u, gradients[_key(u.gradient)]))
        ]


def _is_shared(param: ManagedParam, ours: int) -> bool:
    """Return whether more than ``ours`` parameters hold the weight of one."""
    weight = param.owner
    storage: Any = weight.untyped_storage()
    holders = _holders(weight)
    in_row = param.host is None and param.tier is not Tier.DEVICE
    if in_row and param.order is not None:  # as a view of it ([Note: Memory formats])
        as_in_row = param.parameter
        ours += (_holders(weight) - holders) * ours
        del as_in_row
    # All memory of CUDA counts as shared between processes.
    return holders > ours or bool(weight.is_cpu and storage.is_shared())


def _is_rewritten(update: ParamUpdate, ours: int) -> bool:
    """Return whether more than ``ours`` updates hold the gradient that one reads."""
    gradient, shown = update.gradient, update.param.owner.grad
    if gradient is None:
        return False
    # A view in another order of dimensions holds its base, which may be in ``.grad``.
    twice = gradient._base is not None  # noqa: SLF001  # nothing public says it
    # The place of a gradient that was used has no memory.
    if shown is not None and shown is not gradient and type(shown) in PLAIN_TENSORS:
        twice = twice or _key(shown) == _key(gradient)
    return _holders(gradient) > ours * (1 + twice)


def _siblings(tensors: Iterable[torch.Tensor]) -> Mapping[int, int]:
    """Return how many of ``tensors`` share each storage; 0 if two have the same elements."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        start = tensor.data_ptr()
        spans.setdefault(_key(tensor), []).append((start, start + tensor.nbytes))
    counts: dict[int, int] = {}
    for key, places in spans.items():
        places.sort()
        is_apart = all(a[1] <= b[0] for a, b in itertools.pairwise(places))
        counts[key] = len(places) if is_apart else 0
    return counts


def _key(tensor: torch.Tensor) -> int:
    """Return what is the same for all tensors of one storage."""
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)  # noqa: SLF001  # what torch's count below is asked with


def _holders(tensor: torch.Tensor) -> int:
    """Return the number of tensors, and other holders, of the storage of ``tensor``.

    The storage's own Python object, which we hold too, does not count.
    """
    storage: Any = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # noqa: SLF001
