"""Gathers full tensors from shards into host memory, and scatters them back."""

import os
from collections.abc import Iterator
from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.fsdp.sharding import verify_weights_together
from tensorstow.fsdp.units import aliases_of
from tensorstow.tensors.dtensor import part_of, to_local
from tensorstow.tensors.shares import share_of


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
    readers = {n: files.reader([n, *aliases.get(n, [])], t) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        values = readers[name](0, tensor.shape[0] if tensor.ndim else 0)
        if isinstance(tensor, DTensor):
            copy_from_full(tensor, values)
        else:  # the tensor is whole, even if this rank updates only some of its rows
            tensor.detach().copy_(values)
    files.validate_unchanged()


def _on_host(mesh: DeviceMesh) -> DeviceMesh:
    """Return the same ranks for tensors in host memory."""
    return mesh if mesh.device_type == "cpu" else _host_mesh(tuple(mesh.shape))


@cache
def _host_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)
