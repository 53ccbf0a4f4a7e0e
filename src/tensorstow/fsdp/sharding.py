"""Shards a model: the device mesh, each rank's rows, and the units given to FSDP2."""

import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError, RankError, StowError
from tensorstow.base.launch import Launch, launched
from tensorstow.base.sizes import format_count
from tensorstow.base.tiers import Tier
from tensorstow.checkpoint.frozen_weights import is_same_bytes
from tensorstow.checkpoint.pretrained import PretrainedFiles, RowReader
from tensorstow.fsdp.experts import RoutedReads
from tensorstow.fsdp.h2d_prefetch import H2DPrefetcher
from tensorstow.fsdp.shard_storage import (
    DiskShard,
    FrozenLayout,
    Prefetcher,
    ShardStorage,
)
from tensorstow.fsdp.stowed_parameter import (
    AllGatherInput,
    InPlaceReduceScatter,
    StowedParameter,
    UnshardedAlias,
    storage_of,
)
from tensorstow.fsdp.units import Unit
from tensorstow.io.device_link import is_away
from tensorstow.io.digest_list import DigestList, verify
from tensorstow.io.local_ranks import local_ranks
from tensorstow.io.pinned import PinnedBlock
from tensorstow.memory.buffer_pool import BufferPool
from tensorstow.optim.one_optimizer import note_replaced
from tensorstow.planner.sizes import padded_bytes
from tensorstow.tensors.dtensor import rows_of_rank, rows_per_rank

logger = logging.getLogger("tensorstow")

_Value = TypeVar("_Value")

# --- ranks ---


def current_device() -> torch.device:
    """Return the device that this rank computes on: an accelerator with its index, or the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def world_size() -> int:
    """Return the number of ranks, also before a process group exists."""
    if dist.is_initialized():
        return dist.get_world_size()
    return launched().world


def rank_here() -> int:
    """Return the rank of this process, also before a process group exists."""
    return dist.get_rank() if dist.is_initialized() else launched().rank or 0


def make_mesh(device: torch.device, *, stage: int, replicas: int) -> DeviceMesh:
    """Return the mesh over all ranks: (shard,), or (replicate, shard).

    Joins the ranks first, as ``join_ranks`` does. Under stage 0 every rank has everything: as many
    replicas as ranks. Raises OptionError if the ranks are no multiple of ``replicas``.
    """
    join_ranks(launched(), backend_of(device))
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
"""The groups for tensors in host memory, by the default group; torch holds both."""


def host_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks that takes tensors in host memory; None: there is one rank.

    The first call is collective if the default group takes only an accelerator's tensors.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    whole = dist.group.WORLD
    if whole is not None and torch.device("cpu") in whole._device_types:  # noqa: SLF001
        return whole
    reference = _HOST_GROUPS.get(whole)
    group: dist.ProcessGroup | None = None if reference is None else reference()
    if group is None:
        group = dist.new_group(backend="gloo")
        _HOST_GROUPS[whole] = weakref.ref(group)
    return group


def from_every_rank(value: _Value) -> list[_Value]:
    """Return every rank's value, by rank; collective."""
    group = host_group()
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def on_every_rank(act: Callable[[], _Value], task: str) -> _Value:
    """Call a function on every rank, and raise on all of them if it fails on one; collective.

    Args:
        act: The function to call. If it is collective, it must fail on all ranks or on none.
        task: What it does, for the errors: "write a file".

    Raises:
        StowError: It failed on another rank. An error of ``act`` on this rank has a note.
    """
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001  # it is raised below
        failure = error
    # Other ranks get the text: not every exception can be pickled.
    failures = from_every_rank(failure and repr(failure))
    if failure is not None:
        failure.add_note(f"Rank {rank_here()} could not {task}.")
        raise failure
    other = next((rank for rank, text in enumerate(failures) if text), None)
    if other is not None:
        message = f"Rank {other} could not {task}: {failures[other]}. That rank has the traceback."
        raise StowError(message)
    return result


def gather_digests(listed: DigestList) -> None:
    """Note the digests that other ranks have noted of their files; collective."""
    for digests in from_every_rank(listed.digests):
        listed.digests |= digests


def verify_together(main: Path) -> None:
    """Verify the files of a checkpoint, of which each rank of a machine reads some; collective.

    ``main`` is the file that is named to load the checkpoint.
    """
    ranks = None if host_group() is None else local_ranks()
    on_every_rank(partial(verify, main, ranks), f"read the checkpoint of {main}")


def verify_weights_together(files: PretrainedFiles) -> None:
    """Verify files of weights, of which each rank of a machine reads some; collective."""
    ranks = None if host_group() is None else local_ranks()
    on_every_rank(partial(files.verify, ranks), f"read the weights in {files.path}")


def backend_of(device: torch.device) -> str:
    """Return what ``init_process_group`` takes for ``device`` and for tensors in host memory."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def join_ranks(launch: Launch, backend: str, timeout: timedelta | None = None) -> None:
    """Join the process group of the launcher's ranks; a single process makes its own.

    No-op if a process group exists. Without a timeout, collectives wait as torch's do.

    Raises:
        OptionError: There are several ranks, and no address where they meet.
        RankError: They did not meet.
    """
    if dist.is_initialized():
        return
    rank, host, port = launch.meeting()
    if launch.world == 1:
        # A single rank meets nobody: a store within the process needs no port.
        dist.init_process_group(backend, None, timeout, 1, 0, HashStore())
        return
    logger.info("%s: joining the ranks that meet at %s:%d", launch.source, host, port)
    try:
        dist.init_process_group(backend, None, timeout, launch.world, rank)
    except (RuntimeError, OSError) as error:
        advice = "Start all of them, where they reach that address."
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            advice = (
                "torchrun has restarted them, and gives them the addresses of ranks that have ended"
                " unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set for torchrun itself."
            )
        message = (
            f"{launch.source}: {launch.world} ranks were to meet at {host}:{port}, and did not:"
            f" {error} {advice} If this process trains a model of its own, set WORLD_SIZE=1."
        )
        raise RankError(message) from error


# --- sharding ---


@dataclass(frozen=True, slots=True)
class Sharding:
    """Options shared by all units: ranks, device, dtypes, unsharding and reduction."""

    mesh: DeviceMesh
    device: torch.device
    precision: MixedPrecisionPolicy
    reshard_after_forward: bool
    reduction: Any = field(default_factory=InPlaceReduceScatter)
    """Reduces gradients if the mesh has one rank and the device is the CPU."""
    scalars: Collection[nn.Parameter] = ()
    """Parameters that stay plain: FSDP2 does not see them ([Note: Scalars] in shared_weights)."""
    unsharded: frozenset[str] = frozenset()
    """Units that stay unsharded after forward in any case."""
    h2d_prefetcher: H2DPrefetcher | None = None
    """Copies shards to the device, if it has memory of its own."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks that a parameter is sharded over."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """Return this process's rank among them."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def is_in_place(self) -> bool:
        """Return whether weights are whole where they are computed with ([Note: Single rank])."""
        return self.ranks == 1 and not is_away(self.device)

    def reshards(self, unit: Unit) -> bool:
        """Return whether a unit is resharded after its forward."""
        return self.reshard_after_forward and unit.name not in self.unsharded

    def rows(self, shape: torch.Size) -> tuple[int, int, int]:
        """Return this rank's first row of a parameter of this shape, and the one after its last.

        The third number is how many rows every rank's padded shard has.
        """
        start, stop = rows_of_rank(shape[0], self.rank, self.ranks)
        return start, stop, rows_per_rank(shape[0], self.ranks)


@dataclass(frozen=True, slots=True)
class DiskPool:
    """The buffers and the prefetcher of units on DISK."""

    buffers: BufferPool
    prefetcher: Prefetcher
    frozen: Mapping[str, FrozenLayout]
    """Weights that stay in the user's files, and codes in host memory, by the units' names."""


def shard_unit(
    unit: Unit,
    tier: Tier,
    sharding: Sharding,
    values: Mapping[str, RowReader],
    pool: DiskPool | None,
) -> list[tuple[DTensor, ShardStorage]]:
    """Shard a unit with FSDP2, with its parameters on ``tier``; its module's tensors are replaced.

    ``values`` are readers of the first values, by parameter name. Returns the sharded parameters
    with their storages: none on DEVICE, where FSDP2 holds them.
    """
    if tier == Tier.DEVICE and is_away(sharding.device):  # else DEVICE and HOST are one
        _place_on_device(unit, sharding.device, values)
        _fully_shard(unit, sharding)
        return []
    # Units in ``frozen`` have buffers of the pool, and all others have plain host memory.
    pool = pool if pool is not None and unit.name in pool.frozen else None
    storages = _allocate(unit, tier, sharding, pool)
    _read_values(unit, storages, sharding, values, pool)
    for name, parameter in unit.parameters.items():
        alias = UnshardedAlias(storages[name]) if sharding.is_in_place else None
        gather = AllGatherInput(storages[name], alias, sharding.h2d_prefetcher)
        stowed = StowedParameter(parameter.detach(), sharding.device, gather)
        note_replaced(name, parameter)
        replace_parameter(unit.module, parameter, nn.Parameter(stowed, parameter.requires_grad))
    _fully_shard(unit, sharding)
    # fully_shard() needs shapes alone. Later operations use the bytes.
    for storage in storages.values():
        storage.is_sharded = True
    for buffer in dict.fromkeys(storage.pager for storage in storages.values()):
        if buffer is not None and buffer.pieces:
            RoutedReads(unit.module, buffer)
    if sharding.h2d_prefetcher is not None:
        sharding.h2d_prefetcher.add_unit(
            list(storages.values()),
            [sharding.precision.param_dtype or s.padded.dtype for s in storages.values()],
            None if pool is None else pool.prefetcher,
            is_gathered_twice=sharding.reshards(unit),
        )
    # FSDP2 has put DTensors in place of the parameters: find them by their storages.
    storage_ids = {id(storage) for storage in storages.values()}
    stored: list[tuple[DTensor, ShardStorage]] = []
    for parameter in unit.module.parameters():
        shard = storage_of(parameter)
        if shard is not None and id(shard) in storage_ids and isinstance(parameter, DTensor):
            stored.append((parameter, shard))
    return stored


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


def _allocate(
    unit: Unit, tier: Tier, sharding: Sharding, pool: DiskPool | None
) -> dict[str, ShardStorage]:
    """Return storage of each parameter: in host memory, in the user's files, or of zeros."""
    if pool is None:
        return _allocate_on_host(unit.parameters, sharding)
    if tier == Tier.DISK:
        return _allocate_on_disk(unit, sharding, pool)
    frozen = pool.frozen[unit.name]
    coded = {n: p for n, p in unit.parameters.items() if n in frozen.at}
    plain = {n: p for n, p in unit.parameters.items() if n not in frozen.at}
    decoded = _allocate_on_disk(replace(unit, parameters=coded), sharding, pool)
    both = _allocate_on_host(plain, sharding) | decoded
    return {name: both[name] for name in unit.parameters}


def _allocate_on_host(
    parameters: Mapping[str, nn.Parameter], sharding: Sharding
) -> dict[str, ShardStorage]:
    """Return zeroed storage of each parameter, in one block for all."""
    storages: dict[str, ShardStorage] = {}
    nbytes = sum(padded_bytes(p, sharding.ranks) for p in parameters.values())
    block = None
    if sharding.h2d_prefetcher is not None:
        link = sharding.h2d_prefetcher.link
        block = PinnedBlock(nbytes, link.device, link.synchronize)
    at = 0
    for name, parameter in parameters.items():
        start, stop, length = sharding.rows(parameter.shape)
        shape = (length, *parameter.shape[1:])
        if block is not None:
            part = block.tensor(at, torch.Size(shape).numel(), parameter.dtype)
            padded = part.view(shape).data  # a version counter of its own
            storages[name] = ShardStorage(padded, stop - start, block)
        else:
            zeros = torch.zeros(shape, dtype=parameter.dtype, device="cpu")
            storages[name] = ShardStorage(zeros, stop - start)
        at += padded_bytes(parameter, sharding.ranks)
    return storages


def _allocate_on_disk(unit: Unit, sharding: Sharding, pool: DiskPool) -> dict[str, ShardStorage]:
    """Return storage of each parameter: in the user's files, or in a buffer of zeros."""
    frozen = pool.frozen[unit.name]
    places, at = dict(frozen.at), 0
    for name, parameter in unit.parameters.items():
        if name not in frozen.at:
            places[name] = at
            at += padded_bytes(parameter, sharding.ranks)
    # One buffer for updates, one for files ([Note: Two buffers] in shard_storage).
    written = pool.buffers.add(at) if at else None
    read = None
    if frozen.at:
        read = pool.buffers.add(frozen.nbytes, frozen.runs, frozen.decoder, frozen.pieces)
    both = [buffer for buffer in (written, read) if buffer is not None]
    storages: dict[str, ShardStorage] = {}
    for name, parameter in unit.parameters.items():
        start, stop, length = sharding.rows(parameter.shape)
        shape = (length, *parameter.shape[1:])
        buffer = read if name in frozen.at else written
        if buffer is None:  # no elements
            storages[name] = ShardStorage(torch.zeros(shape, dtype=parameter.dtype), stop - start)
        else:
            padded = buffer.tensor(places[name], shape, parameter.dtype)
            storages[name] = DiskShard(padded, stop - start, buffer, pool.prefetcher, both)
    return storages


@torch.no_grad()
def _read_values(
    unit: Unit,
    storages: Mapping[str, ShardStorage],
    sharding: Sharding,
    values: Mapping[str, RowReader],
    pool: DiskPool | None,
) -> None:
    """Copy the first values to storage, except those that are in the user's files."""
    in_files = {} if pool is None else pool.frozen[unit.name].at
    # All at once: a buffer on disk is written whenever the last of its pins ends.
    with ExitStack() as accessed:
        for name, storage in storages.items():
            if name not in in_files:
                accessed.enter_context(storage.access(write=True))
        for name, parameter in unit.parameters.items():
            start, stop, _ = sharding.rows(parameter.shape)
            if stop > start and name not in in_files:
                storages[name].local_shard.copy_(values[name](start, stop))
    if sharding.mesh.size() > 1:  # the first rank's values count, and its files may differ
        for name in in_files:
            start, stop, _ = sharding.rows(unit.parameters[name].shape)
            if stop > start and not unit.parameters[name].is_meta:
                _write_if_other(storages[name], values[name](start, stop))


def _write_if_other(storage: ShardStorage, values: torch.Tensor) -> None:
    """Write to a weight that is in the user's files, and leaves them then, if values differ."""
    with storage.access(write=False):
        is_same = is_same_bytes(storage.local_shard, values.contiguous())
    if not is_same:
        with storage.access(write=True):
            storage.local_shard.copy_(values)


def _place_on_device(unit: Unit, device: torch.device, values: Mapping[str, RowReader]) -> None:
    for name, parameter in unit.parameters.items():
        placed = values[name](0, parameter.shape[0]).to(device)
        note_replaced(name, parameter)
        replace_parameter(unit.module, parameter, nn.Parameter(placed, parameter.requires_grad))


def _fully_shard(unit: Unit, sharding: Sharding) -> None:
    fully_shard(
        unit.module,
        mesh=sharding.mesh,
        reshard_after_forward=sharding.reshards(unit),
        mp_policy=sharding.precision,
        ignored_params=set(sharding.scalars) or None,
    )
    if sharding.is_in_place and isinstance(unit.module, FSDPModule):
        unit.module.set_custom_reduce_scatter(sharding.reduction)
