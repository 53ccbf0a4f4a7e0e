"""Gathers full tensors from shards, also in place of a parameter, and scatters them back."""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.fsdp.module_hooks import records_of
from tensorstow.fsdp.sharding import verify_weights_together
from tensorstow.fsdp.units import aliases_of
from tensorstow.tensors.dtensor import part_of, to_local
from tensorstow.tensors.shares import share_of

_SLOTS = ("_local_tensor", "_spec")
_INSIDE: dict[int, torch.Tensor] = {}
"""The tensor with the shard of each parameter that is whole now, by the parameter's ``id``."""

_HOST_MESHES: "weakref.WeakKeyDictionary[Any, dict[DeviceMesh, DeviceMesh]]" = (
    weakref.WeakKeyDictionary()
)
"""The meshes of tensors in host memory, by the default group and the mesh of an accelerator."""
_RECORDS: Any = WeakIdKeyDictionary()
"""Weak references to FSDP2's records of sharded parameters, by parameter."""


def resharded(module: nn.Module) -> nn.Module:
    """Reshard the parameters that a forward left unsharded, and return the module."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return module


def whole_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole weights and persistent buffers by name, in host memory; collective.

    They are gathered one after the other; tied ones come under each of their names. On a single
    rank, tensors of parameters in host memory share their memory.
    """
    for name, values in resharded(module).state_dict().items():
        yield name, whole_on_host(values)


@torch.no_grad()
def whole_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor in host memory; collective."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return whole.cpu()


def host_dtensor(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a DTensor in host memory of this rank's shard, sharded like ``parameter``."""
    share = share_of(parameter)
    if share is not None:
        return local if isinstance(local, DTensor) else share.sharded(local)
    if not isinstance(parameter, DTensor) or isinstance(local, DTensor):
        return local
    return DTensor.from_local(
        local,
        _on_host(parameter.device_mesh),
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def full_tensor(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of the shards of all ranks; collective."""
    tensor = host_dtensor(local, parameter)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def full_copy(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter's full tensor; collective."""
    with torch.no_grad():
        # On a single rank full_tensor() may return the shard itself: copy in any case.
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return whole.detach().clone()


def copy_from_full(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's rows of ``whole`` to its shard of a parameter."""
    with torch.no_grad():
        to_local(parameter).copy_(part_of(whole, parameter, "The value"))


def copy_from_files(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read weights and buffers from safetensors into an allocated model; call it on every rank.

    One tensor is in memory at a time. If the files lack a parameter, nothing is changed.

    Raises:
        StoreFormatError: The files are not the model's.
        DamageError: A file has another digest than what was written, and nothing was changed; or
            it was changed while it was read, and the weights are of both.
    """
    files = PretrainedFiles(path, model)
    verify_weights_together(files)
    aliases = aliases_of(model)
    tensors: dict[str, torch.Tensor] = dict(resharded(model).named_parameters())
    tensors |= {name: b for name, b in model.named_buffers() if files.has(name)}
    # All readers come before any copy: the reader of a tensor that is missing raises the error.
    readers = {n: files.reader([n, *aliases.get(n, [])], t) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        values = readers[name](0, tensor.shape[0] if tensor.ndim else 0)
        if isinstance(tensor, DTensor):
            copy_from_full(tensor, values)
        else:  # the tensor is whole, even if this rank updates only some of its rows
            tensor.detach().copy_(values)
    files.validate_unchanged()


def _on_host(mesh: DeviceMesh) -> DeviceMesh:
    """Return the same ranks, in the same order, for tensors in host memory."""
    if mesh.device_type == "cpu":
        return mesh
    # A row of a larger mesh: all ranks make the groups of all rows, in one order.
    root = mesh._get_root_mesh()  # noqa: SLF001  # nothing public does
    # Another default group has other groups of the same ranks.
    of_group = _HOST_MESHES.setdefault(dist.group.WORLD, {})
    if root not in of_group:
        of_group[root] = DeviceMesh("cpu", root.mesh, mesh_dim_names=root.mesh_dim_names)
    names = mesh.mesh_dim_names
    return of_group[root] if mesh is root or names is None else of_group[root][names]


# --- whole in place ---


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
        # ``isinstance`` takes a tensor with this attribute for an nn.Parameter.
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
