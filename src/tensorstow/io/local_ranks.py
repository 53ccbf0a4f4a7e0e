"""How many ranks run on this machine, and which of them this process is."""

import os
from collections.abc import Mapping
from ipaddress import ip_address

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tensorstow.base.core_share import LocalRanks
from tensorstow.base.launch import launched


def local_ranks(environ: Mapping[str, str] = os.environ) -> LocalRanks:
    """Return the ranks on this machine.

    They are read from the environment (torchrun and mpirun set it), else from the process group:
    ranks whose rendezvous is a loopback address are on one machine, and ranks with accelerators
    are assumed to be one for each device, as torch's device meshes assume.
    """
    launch = launched(environ)
    if launch.local_world is None:
        return _of_group()
    if launch.local_rank is None:
        count = launch.local_world
        return LocalRanks(count, 0 if count == 1 else _among(count))
    return LocalRanks(launch.local_world, launch.local_rank)


def _among(count: int) -> int | None:
    """Return this rank's number among ``count`` on its machine; None if no group gives it.

    A group of fewer ranks is ignored: ``stow`` creates one of this process alone if there is none.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < count:
        return None
    return dist.get_rank() % count


def _of_group() -> LocalRanks:
    if not (dist.is_available() and dist.is_initialized()):
        return LocalRanks()
    whole, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if whole is None or world == 1:
        return LocalRanks()
    if _is_loopback(whole):
        return LocalRanks(world, rank)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator not in whole._device_types:  # noqa: SLF001
        return LocalRanks()
    # Not torch.accelerator's count: that one starts the driver, and a process may fork later.
    count = min(world, torch.get_device_module(accelerator).device_count())
    return LocalRanks(count, rank % count) if count else LocalRanks()


def _is_loopback(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of a group can only be on this machine."""
    store = group.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return False
    try:
        return store.host == "localhost" or ip_address(store.host).is_loopback
    except ValueError:  # a name
        return False
