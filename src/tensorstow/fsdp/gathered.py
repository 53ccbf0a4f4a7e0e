"""Makes a sharded parameter whole in place, for every variable that refers to it."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from tensorstow.fsdp.full_tensors import full_copy

_SLOTS = ("_local_tensor", "_spec")
_INSIDE: dict[int, torch.Tensor] = {}
"""What holds the shard of a parameter that is whole at present, by the parameter's ``id``."""

_RECORDS: Any = WeakIdKeyDictionary()
"""Weak references to FSDP2's records of sharded parameters, by parameter."""


class FullParameter(torch.Tensor):
    """A whole parameter in the object of a sharded one; what is computed of it is plain tensors.

    It has the slots of a DTensor, for Python changes the class of an object only between classes of
    one layout.
    """

    __slots__ = _SLOTS
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  # torch's own signature
        """Be saved as a plain parameter."""
        plain: Any = nn.Parameter(self.data, self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Be copied as a plain parameter."""
        copy = memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return copy


@contextmanager
def whole_in_place(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Let ``parameter`` itself hold a copy of its full tensor; collective.

    Args:
        parameter: A parameter, sharded or not. Its gradient is out of sight inside the context,
            where it is sharded.

    Yields:
        What holds the shard meanwhile: a tensor to copy changes to. Changes are dropped otherwise.
    """
    known = _INSIDE.get(id(parameter))
    if known is not None:  # a context within a context
        yield known
    elif isinstance(parameter, DTensor):
        whole: Any = torch.Tensor._make_subclass(  # noqa: SLF001
            FullParameter, full_copy(parameter), parameter.requires_grad
        )
        whole._is_param = isinstance(parameter, nn.Parameter)  # noqa: SLF001
        for slot in _SLOTS:  # a forward inside the context gathers the shards as ever
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
    """Return whether a parameter is inside of ``whole_in_place``.

    Args:
        parameter: A parameter.
    """
    return id(parameter) in _INSIDE


def note_parameters(module: nn.Module) -> None:
    """Note FSDP2's record of each parameter, to be called once a model is sharded.

    Args:
        module: The model, whose parameters ``whole_in_place`` is called with.
    """
    for record in _records(module):
        _RECORDS[record.sharded_param] = weakref.ref(record)


def is_unsharded(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Return whether a parameter is the unsharded one of a forward, until its backward.

    Args:
        module: A sharded model.
        parameter: A tensor.

    Returns:
        False for a parameter that is a shard, and for one of a model that is not sharded.
    """
    found = (getattr(record, "_unsharded_param", None) for record in _records(module))
    return any(unsharded is parameter for unsharded in found)


def _records(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
                yield from group.fsdp_params


@contextmanager
def _left_alone(parameter: torch.Tensor) -> Iterator[None]:
    """Keep FSDP2 from taking the parameter's shard anew, which it does behind load_state_dict."""
    known = _RECORDS.get(parameter)
    record = None if known is None else known()
    if record is None:
        yield
        return
    record.reset_sharded_param = lambda: None
    try:
        yield
    finally:
        del record.reset_sharded_param


def _exchange(first: Any, second: Any) -> None:  # noqa: ANN401  # tensors, whose slots are private
    """Exchange what two objects of one layout are; their slots are the same.

    ``torch.utils.swap_tensors`` refuses objects that have weak references, as parameters have here:
    those are to follow the object.
    """
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)  # noqa: SLF001
