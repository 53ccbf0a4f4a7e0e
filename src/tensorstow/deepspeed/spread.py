"""Between whole tensors and what each rank has of them, in host memory, as a parameter is cut."""

from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tensorstow.tensors.dtensor import shard_of


def at_rest(module: nn.Module) -> nn.Module:
    """Let the module have its sharded parameters, which a forward may have left gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return module


def rows_of(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the view of ``whole`` that this rank has, cut as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, count = parameter.device_mesh, shard_of(parameter).shape[0]
    dim = mesh.ndim - 1
    length = -(-whole.shape[0] // mesh.size(dim))
    start = min(mesh.get_local_rank(dim) * length, whole.shape[0])
    return whole[start : start + count]


def spread(own: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor, cut as ``parameter`` is, of which this rank has ``own``."""
    if not isinstance(parameter, DTensor) or isinstance(own, DTensor):
        return own
    return DTensor.from_local(
        own,
        _on_host(parameter.device_mesh),
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def own_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of ``tensor``."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def joined(own: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of which each rank has ``own``; collective."""
    tensor = spread(own, parameter)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def whole_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter's whole values; collective."""
    with torch.no_grad():
        # A rank alone has the whole shard for its full tensor: a copy in any case.
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return whole.detach().clone()


def put_whole(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Write this rank's rows of ``whole`` to a parameter."""
    with torch.no_grad():
        own_of(parameter).copy_(rows_of(whole, parameter))


def _on_host(mesh: DeviceMesh) -> DeviceMesh:
    """Return the same ranks for tensors in host memory."""
    return mesh if mesh.device_type == "cpu" else _host_mesh(tuple(mesh.shape))


@cache
def _host_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)
