"""Shards a model: the device mesh, each rank's rows, and the units given to FSDP2."""

import os
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.sizes import format_count
from tensorstow.base.tiers import Tier
from tensorstow.checkpoint.pretrained import RowReader
from tensorstow.fsdp.h2d_prefetch import H2DPrefetcher
from tensorstow.fsdp.shard_storage import DiskShard, HostShard, Prefetcher, ShardStorage
from tensorstow.fsdp.single_rank import InPlaceReduceScatter, UnshardedAlias
from tensorstow.fsdp.stowed_parameter import AllGatherInput, StowedParameter, storage_of
from tensorstow.fsdp.units import Unit
from tensorstow.io.buffer_pool import BufferPool
from tensorstow.io.device_link import is_away
from tensorstow.io.pinned import PinnedBlock
from tensorstow.planner.sizes import padded_bytes
from tensorstow.tensors.dtensor import rows_of_rank, rows_per_rank

_Found = TypeVar("_Found")

# --- ranks ---


def current_device() -> torch.device:
    """Return the device that this rank computes on.

    Returns:
        The accelerator with its index, or the CPU where there is none.
    """
    found = torch.accelerator.current_accelerator()
    if found is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def world_size() -> int:
    """Return the number of ranks, also before a process group exists."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def make_mesh(device: torch.device, *, stage: int, replicas: int) -> DeviceMesh:
    """Return the mesh over all ranks: (shard,), or (replicate, shard).

    Starts a process group where there is none: torchrun's, or one of this process alone.

    Args:
        device: What this rank computes on.
        stage: The ZeRO stage; under 0 every rank has everything: as many replicas as ranks.
        replicas: How many groups of ranks have the whole model each.

    Raises:
        OptionError: The ranks are no multiple of ``replicas``.
    """
    join_ranks(device)
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


_HOST_GROUPS: "weakref.WeakKeyDictionary[Any, weakref.ref[Any]]" = weakref.WeakKeyDictionary()
"""The groups that were made for host memory, by the default group; torch holds both."""


def host_group() -> dist.ProcessGroup | None:
    """Return all ranks as a group that takes tensors in host memory; None where there is one rank.

    A collective call the first time where the default group takes only an accelerator's.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    whole = dist.group.WORLD
    if whole is not None and torch.device("cpu") in whole._device_types:  # noqa: SLF001
        return whole
    known = _HOST_GROUPS.get(whole)
    own: dist.ProcessGroup | None = None if known is None else known()
    if own is None:
        own = dist.new_group(backend="gloo")
        _HOST_GROUPS[whole] = weakref.ref(own)
    return own


def on_every_rank(act: Callable[[], _Found], what: str) -> _Found:
    """Do something on every rank, and raise on all of them what fails on one; collective.

    Args:
        act: What is done; where it is collective itself, it fails on all ranks or on none.
        what: What it does, for the error on the other ranks: "write a file".

    Returns:
        What ``act`` returns here, when all ranks have done it.

    Raises:
        StowError: It failed on another rank. Here the error of ``act`` is raised, with a note.
    """
    failure: Exception | None = None
    try:
        found = act()
    except Exception as error:  # noqa: BLE001  # it is raised below
        failure = error
    group = host_group()
    if group is not None:
        failures: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, failure and repr(failure), group)
        other = next((rank for rank, text in enumerate(failures) if text), None)
        if failure is None and other is not None:
            message = (
                f"Rank {other} could not {what}: {failures[other]}. That rank has the traceback."
            )
            raise StowError(message)
    if failure is not None:
        failure.add_note(f"Rank {0 if group is None else dist.get_rank(group)} could not {what}.")
        raise failure
    return found


def backend_of(device: torch.device) -> str:
    """Return what ``init_process_group`` takes for ``device`` and for tensors in host memory."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def join_ranks(device: torch.device) -> None:
    """Start a process group where there is none: torchrun's, or one of this process alone.

    Args:
        device: What this rank computes on.
    """
    if dist.is_initialized():
        return
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend=backend_of(device))
        return
    dist.init_process_group(backend=backend_of(device), store=HashStore(), rank=0, world_size=1)


# --- sharding ---


@dataclass(frozen=True, slots=True)
class Sharding:
    """Options shared by all units: ranks, device, dtypes, unsharding and reduction."""

    mesh: DeviceMesh
    device: torch.device
    precision: MixedPrecisionPolicy
    reshard_after_forward: bool
    reduction: Any = field(default_factory=InPlaceReduceScatter)
    """What reduces gradients where the mesh has one rank and the device is the CPU."""
    scalars: Collection[nn.Parameter] = ()
    """What stays plain, which FSDP2 does not see ([Note: Scalars] in shared_weights)."""
    unsharded: frozenset[str] = frozenset()
    """Units that are not resharded after forward all the same."""
    h2d_prefetcher: H2DPrefetcher | None = None
    """What copies shards to the device, where that has memory of its own."""

    @property
    def ranks(self) -> int:
        """Return over how many ranks a parameter is sharded."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """Return which of them this is."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def is_in_place(self) -> bool:
        """Return whether weights are whole where they are computed with: see single_rank."""
        return self.ranks == 1 and not is_away(self.device)

    def rows(self, shape: torch.Size) -> tuple[int, int, int]:
        """Return this rank's rows of a parameter.

        Args:
            shape: The whole parameter's; its first dimension is cut.

        Returns:
            The first row, the one after the last, and how many every rank's padded shard has.
        """
        start, stop = rows_of_rank(shape[0], self.rank, self.ranks)
        return start, stop, rows_per_rank(shape[0], self.ranks)


@dataclass(frozen=True, slots=True)
class DiskPool:
    """The buffers and the prefetcher of units on DISK."""

    buffers: BufferPool
    prefetcher: Prefetcher


def shard_unit(
    unit: Unit,
    tier: Tier,
    sharding: Sharding,
    values: Mapping[str, RowReader],
    pool: DiskPool | None,
) -> list[tuple[DTensor, ShardStorage]]:
    """Shard a unit with FSDP2, with its parameters on ``tier``.

    Args:
        unit: The unit; its module's tensors are replaced.
        tier: The tier of its parameters.
        sharding: Options of all units.
        values: Readers of the first values, by parameter name.
        pool: Buffers of units on DISK; None: there are none.

    Returns:
        The sharded parameters with their storages; empty on DEVICE, where FSDP2 holds them.
    """
    if tier == Tier.DEVICE and is_away(sharding.device):  # else DEVICE and HOST are one
        _place_on_device(unit, sharding.device, values)
        _fully_shard(unit, sharding)
        return []
    pool = pool if tier == Tier.DISK else None
    storages = _allocate(unit, sharding, pool)
    _read_values(unit, storages, sharding, values)
    for name, parameter in unit.parameters.items():
        alias = UnshardedAlias(storages[name]) if sharding.is_in_place else None
        gather = AllGatherInput(storages[name], alias, sharding.h2d_prefetcher)
        stowed = StowedParameter(parameter.detach(), sharding.device, gather)
        replace_parameter(unit.module, parameter, nn.Parameter(stowed, parameter.requires_grad))
    _fully_shard(unit, sharding)
    for storage in storages.values():
        storage.is_sharded = True
    if sharding.h2d_prefetcher is not None:
        sharding.h2d_prefetcher.add_unit(
            list(storages.values()),
            [sharding.precision.param_dtype or s.padded.dtype for s in storages.values()],
            None if pool is None else pool.prefetcher,
            is_gathered_twice=sharding.reshard_after_forward
            and unit.name not in sharding.unsharded,
        )
    known = {id(storage) for storage in storages.values()}
    found: list[tuple[DTensor, ShardStorage]] = []
    for parameter in unit.module.parameters():
        own = storage_of(parameter)
        if own is not None and id(own) in known and isinstance(parameter, DTensor):
            found.append((parameter, own))
    return found


def replace_parameter(root: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put ``new`` wherever a module below ``root`` has ``old``: tied parameters stay tied."""
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):  # noqa: SLF001
            if parameter is old:
                module._parameters[name] = new  # noqa: SLF001


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move every buffer of ``model`` that has values to ``device``."""
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)  # noqa: SLF001


def _allocate(unit: Unit, sharding: Sharding, pool: DiskPool | None) -> dict[str, ShardStorage]:
    """Return zeroed storage of each parameter, in one block or buffer for all of a unit's."""
    storages: dict[str, ShardStorage] = {}
    nbytes = sum(padded_bytes(p, sharding.ranks) for p in unit.parameters.values())
    buffer = pool.buffers.add(nbytes) if pool is not None and nbytes else None
    block = None
    if buffer is None and sharding.h2d_prefetcher is not None:
        link = sharding.h2d_prefetcher.link
        block = PinnedBlock(nbytes, link.device, link.synchronize)
    at = 0
    for name, parameter in unit.parameters.items():
        start, stop, length = sharding.rows(parameter.shape)
        shape = (length, *parameter.shape[1:])
        if buffer is not None and pool is not None:
            padded = buffer.tensor(at, shape, parameter.dtype)
            storages[name] = DiskShard(padded, stop - start, buffer, pool.prefetcher)
        elif block is not None:
            part = block.tensor(at, torch.Size(shape).numel(), parameter.dtype)
            own = part.view(shape).data  # a version counter of its own
            storages[name] = HostShard(own, stop - start, block)
        else:
            zeros = torch.zeros(shape, dtype=parameter.dtype, device="cpu")
            storages[name] = HostShard(zeros, stop - start)
        at += padded_bytes(parameter, sharding.ranks)
    return storages


@torch.no_grad()
def _read_values(
    unit: Unit,
    storages: Mapping[str, ShardStorage],
    sharding: Sharding,
    values: Mapping[str, RowReader],
) -> None:
    with ExitStack() as accessed:
        for storage in storages.values():
            accessed.enter_context(storage.access(write=True))
        for name, parameter in unit.parameters.items():
            start, stop, _ = sharding.rows(parameter.shape)
            if stop > start:
                storages[name].local_shard.copy_(values[name](start, stop))


def _place_on_device(unit: Unit, device: torch.device, values: Mapping[str, RowReader]) -> None:
    for name, parameter in unit.parameters.items():
        placed = values[name](0, parameter.shape[0]).to(device)
        replace_parameter(unit.module, parameter, nn.Parameter(placed, parameter.requires_grad))


def _fully_shard(unit: Unit, sharding: Sharding) -> None:
    fully_shard(
        unit.module,
        mesh=sharding.mesh,
        reshard_after_forward=sharding.reshard_after_forward
        and unit.name not in sharding.unsharded,
        mp_policy=sharding.precision,
        ignored_params=set(sharding.scalars) or None,
    )
    if sharding.is_in_place and isinstance(unit.module, FSDPModule):
        unit.module.set_custom_reduce_scatter(sharding.reduction)
