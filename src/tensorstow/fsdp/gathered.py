"""Makes a sharded parameter whole in place, for every variable that refers to it."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from tensorstow.fsdp.full_tensors import full_copy
from tensorstow.fsdp.module_hooks import param_groups_of

_SLOTS = ("_local_tensor", "_spec")
_INSIDE: dict[int, torch.Tensor] = {}
"""The tensor with the shard of each parameter that is whole now, by the parameter's ``id``."""

_RECORDS: Any = WeakIdKeyDictionary()
"""Weak references to FSDP2's records of sharded parameters, by parameter."""


class FullParameter(torch.Tensor):
    """A whole parameter in the object of a sharded one; operations on it return plain tensors.

    It has the slots of a DTensor, because Python changes the class of an object only between
    classes of one layout.
    """

    __slots__ = _SLOTS
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  # torch's own signature
        """Save as a plain parameter."""
        plain: Any = nn.Parameter(self.data, self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy as a plain parameter."""
        copy = memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return copy


@contextmanager
def whole_in_place(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Let ``parameter`` itself hold a copy of its full tensor; collective.

    Yields the tensor that holds the shard meanwhile: copy changes to it, otherwise they are
    dropped. A sharded parameter has no gradient inside the context.
    """
    shard = _INSIDE.get(id(parameter))
    if shard is not None:  # a context within a context
        yield shard
    elif isinstance(parameter, DTensor):
        whole: Any = torch.Tensor._make_subclass(  # noqa: SLF001
            FullParameter, full_copy(parameter), parameter.requires_grad
        )
        whole._is_param = isinstance(parameter, nn.Parameter)  # noqa: SLF001
        for slot in _SLOTS:  # a forward inside the context gathers the shards as usual
            setattr(whole, slot, getattr(parameter, slot))
        with _left_alone(parameter):
            _exchange(parameter, whole)
            _INSIDE[id(parameter)] = whole
            try:
                yield whole
            finally:
                del _INSIDE[id(parameter)]
                _exchange(parameter, whole)
    else:
        shard = parameter.detach()
        before = parameter.data
        parameter.data = full_copy(parameter)
        _INSIDE[id(parameter)] = shard
        try:
            yield shard
        finally:
            del _INSIDE[id(parameter)]
            parameter.data = before


def is_whole_in_place(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is inside ``whole_in_place``."""
    return id(parameter) in _INSIDE


def note_parameters(module: nn.Module) -> None:
    """Note FSDP2's record of each parameter, for ``whole_in_place``, once a model is sharded."""
    for _, record in records_of(module.modules()):
        _RECORDS[record.sharded_param] = weakref.ref(record)


def is_unsharded(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Return whether a tensor is the unsharded parameter of a forward, until its backward."""
    unsharded = (getattr(r, "_unsharded_param", None) for _, r in records_of(module.modules()))
    return any(candidate is parameter for candidate in unsharded)


def records_of(modules: Iterable[object]) -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2's records of the parameters of those modules that are units, and their groups."""
    for module in modules:
        if isinstance(module, FSDPModule):
            for group in param_groups_of(module._get_fsdp_state()):  # noqa: SLF001  # not public
                yield from ((group, record) for record in group.fsdp_params)


@contextmanager
def _left_alone(parameter: torch.Tensor) -> Iterator[None]:
    """Keep FSDP2 from taking the parameter's shard again, which it does after load_state_dict."""
    reference = _RECORDS.get(parameter)
    record = None if reference is None else reference()
    if record is None:
        yield
        return
    record.reset_sharded_param = lambda: None
    try:
        yield
    finally:
        del record.reset_sharded_param


def _exchange(first: Any, second: Any) -> None:  # noqa: ANN401  # tensors, whose slots are private
    """Exchange the classes, attributes and values of two tensors of one layout, with equal slots.

    ``torch.utils.swap_tensors`` rejects objects that have weak references, and parameters have
    some, which must stay with the object.
    """
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)  # noqa: SLF001
