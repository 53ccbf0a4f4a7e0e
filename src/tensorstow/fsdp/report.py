"""Counts the bytes that a stowed model's parameters hold and have moved."""

from dataclasses import dataclass

from torch import nn

from tensorstow.fsdp.gradient_offload import offload_pinned_bytes, offloaded_bytes
from tensorstow.fsdp.h2d_prefetch import h2d_prefetcher_of
from tensorstow.fsdp.shard_storage import HostShard, ShardStorage
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.io.pinned import PinnedBlock


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of one rank's parameters, padding included."""

    host_bytes: int
    """Of parameters that stay in host memory."""
    disk_bytes: int
    """Of parameters on disk."""
    buffer_pool_bytes: int
    """Host memory that parameters on disk hold now."""
    most_buffer_pool_bytes: int
    """The most that they held at once."""
    bytes_read: int
    bytes_written: int
    link_bytes_down: int
    """Of reduced gradients, from the device that computes; copies where that is not the CPU."""
    link_bytes_up: int
    """Of weights, to the device that computes, for it to gather."""
    pinned_bytes: int
    """Host memory that is pinned, for weights and gradients: where they stay or pass through."""
    staging_bytes: int
    """Host memory that weights pass through which the device cannot copy where they are."""
    device_bytes: int
    """The device's memory that weights pass through before they are gathered."""


def parameter_bytes(model: nn.Module) -> ParameterBytes:
    """Return what a model's parameters hold and have moved on this rank.

    Args:
        model: A model that ``stow`` placed. Of any other all counts are 0.
    """
    shards = [s for p in model.parameters() if (s := storage_of(p)) is not None]
    on_disk = [shard for shard in shards if shard.pager is not None]
    rooms = {id(c.pager.pool): c.pager.pool for c in on_disk if c.pager is not None}
    blocks = {id(block): block.pinned_bytes for shard in shards if (block := _block_of(shard))}
    h2d = h2d_prefetcher_of(model)
    return ParameterBytes(
        host_bytes=sum(shard.padded.nbytes for shard in shards if shard.pager is None),
        disk_bytes=sum(shard.padded.nbytes for shard in on_disk),
        buffer_pool_bytes=sum(room.held_bytes for room in rooms.values()),
        most_buffer_pool_bytes=sum(room.high_water_bytes for room in rooms.values()),
        bytes_read=sum(room.bytes_read for room in rooms.values()),
        bytes_written=sum(room.bytes_written for room in rooms.values()),
        link_bytes_down=sum(shard.bytes_down for shard in shards) + offloaded_bytes(model),
        link_bytes_up=sum(shard.bytes_up for shard in shards),
        pinned_bytes=sum(blocks.values())
        + offload_pinned_bytes(model)
        + (0 if h2d is None else h2d.buffers.pinned_bytes),
        staging_bytes=0 if h2d is None else h2d.buffers.staging_bytes,
        device_bytes=0 if h2d is None else h2d.buffers.device_bytes,
    )


def _block_of(shard: ShardStorage) -> PinnedBlock | None:
    return shard.block if isinstance(shard, HostShard) else None
