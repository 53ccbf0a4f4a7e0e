"""The ranks of a run as FSDP2 wants them: a device mesh, and a group where there is none."""

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import format_count


def device_here() -> torch.device:
    """Return the accelerator of this rank, or the CPU where there is none."""
    found = torch.accelerator.current_accelerator()
    if found is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def world_here() -> int:
    """Return how many ranks there are, before any group is made."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def mesh_of(device: torch.device, *, stage: int, replicas: int) -> DeviceMesh:
    """Return the mesh over all ranks: (shard,), or (replicate, shard) where weights are repeated.

    Starts a process group where there is none: torchrun's, or one of this process alone. Under
    stage 0 every rank has everything: as many replicas as ranks.
    """
    _join(device)
    world = dist.get_world_size()
    copies = world if stage == 0 else replicas
    if world % copies:
        ranks = format_count(world, "rank")
        message = f"replicas={replicas} was given for {ranks}: they are to divide evenly."
        raise OptionError(message)
    if copies == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    shape = (copies, world // copies)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def host_group() -> dist.ProcessGroup | None:
    """Return all ranks as a group that takes tensors in host memory; None where there is one rank.

    A collective call the first time where the default group takes only an accelerator's.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    whole = dist.group.WORLD
    if whole is not None and torch.device("cpu") in whole._device_types:  # noqa: SLF001
        return whole
    own: dist.ProcessGroup = dist.new_group(backend="gloo")
    return own


def _join(device: torch.device) -> None:
    if dist.is_initialized():
        return
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend=_backend(device))
        return
    dist.init_process_group(backend=_backend(device), store=HashStore(), rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
