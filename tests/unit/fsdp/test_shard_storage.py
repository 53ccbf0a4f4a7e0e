"""Shard storage: bytes in host memory, and bytes on disk that are read while they are pinned."""

from pathlib import Path

import pytest
import torch

from tensorstow.fsdp.shard_storage import DiskShard, Prefetcher, ShardStorage
from tensorstow.memory.buffer_pool import BufferPool, PooledBuffer

MIB = 1 << 20


def test_home_is_without_the_padding() -> None:
    shard = ShardStorage(torch.arange(6.0).view(3, 2), 2)
    assert shard.local_shard.tolist() == [[0, 1], [2, 3]]
    assert shard.pin() is shard.padded
    assert shard.pager is None


def test_whoever_reads_waits_for_the_newest_weight() -> None:
    shard = ShardStorage(torch.zeros(2, 2), 2)
    waited: list[bool] = []
    shard.before_read = lambda: waited.append(True)
    shard.pin()
    with shard.access(write=False):
        pass
    assert waited == [True, True]


def test_a_shard_on_disk_is_read_when_pinned_and_written_when_dirty(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 2 * MIB, MIB)
    buffer, other = pool.add(MIB), pool.add(MIB)
    shard = DiskShard(buffer.tensor(0, (4, 2), torch.float32), 3, buffer, Prefetcher(0))
    with shard.access(write=True):
        shard.local_shard.fill_(5.0)
    with torch.no_grad():
        other.pin()  # takes the memory
        assert not buffer.is_in_memory
        other.unpin()
    assert shard.pin()[:3].eq(5.0).all()
    assert shard.pin_for_copy() is shard.padded
    shard.unpin_after_copy()
    assert buffer.pins == 1
    shard.unpin()
    assert pool.bytes_written == MIB
    assert buffer.pins == 0


def test_what_could_not_be_pinned_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BufferPool([tmp_path], MIB, MIB)
    buffer = pool.add(4096)
    prefetcher = Prefetcher(1)
    shard = DiskShard(buffer.tensor(0, (4, 2), torch.float32), 4, buffer, prefetcher)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prefetcher, "record_use", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shard.pin()
    assert buffer.pins == 0
    pool.close()


SIZE = 1 << 16


def _use(buffer: PooledBuffer, prefetcher: Prefetcher) -> bool:
    """Return whether it was in memory before it was requested."""
    there = buffer.is_in_memory
    prefetcher.pin(buffer)
    assert buffer.is_in_memory
    prefetcher.unpin(buffer)
    return there


def test_units_are_fetched_in_the_order_of_forward_and_of_backward(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 5 * SIZE, 3 * SIZE)
    made = [pool.add(SIZE) for _ in range(5)]
    for buffer in made:
        buffer.pin(for_write=True)
        buffer.unpin(dirty=True)
        pool.synchronize()
    prefetcher = Prefetcher(1)
    order = [0, 1, 2, 3, 4, 3, 2, 1, 0]
    first = [_use(made[i], prefetcher) for i in order]
    again = [_use(made[i], prefetcher) for i in order]
    assert not all(first)
    assert all(again[2:])


def test_one_buffer_is_pinned_at_a_time(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 2 * SIZE, 2 * SIZE)
    first, second = pool.add(SIZE), pool.add(SIZE)
    prefetcher = Prefetcher(0)
    prefetcher.pin(first)
    prefetcher.pin(first)  # another parameter of the unit
    assert (first.pins, second.pins) == (1, 0)
    prefetcher.pin(second)  # and nobody has closed the first
    assert (first.pins, second.pins) == (0, 1)
    prefetcher.unpin(first)
    assert (first.pins, second.pins) == (0, 1)
    prefetcher.unpin(second)
    prefetcher.unpin(second)
    assert (first.pins, second.pins) == (0, 0)


def test_nothing_is_fetched_ahead_where_that_was_not_asked(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 3 * SIZE, SIZE)
    made = [pool.add(SIZE) for _ in range(3)]
    for buffer in made:
        buffer.pin(for_write=True)
        buffer.unpin(dirty=True)
    prefetcher = Prefetcher(0)
    for _ in range(2):
        assert not any(_use(made[i], prefetcher) for i in (0, 1, 2))


def test_both_buffers_of_a_unit_are_in_memory_for_a_copy(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 4 * SIZE, 4 * SIZE)
    trained, frozen, other = (pool.add(SIZE) for _ in range(3))
    prefetcher = Prefetcher(0)
    unit = (frozen, trained)
    first, second = (
        DiskShard(buffer.tensor(0, (4, 2), torch.float32), 4, buffer, prefetcher, unit)
        for buffer in (trained, frozen)
    )
    first.pin_for_copy()
    second.pin_for_copy()
    assert (trained.pins, frozen.pins) == (1, 1)
    prefetcher.pin(other)
    assert (trained.pins, frozen.pins, other.pins) == (0, 0, 1)
    first.unpin_after_copy()  # of a unit that is not pinned any more
    assert other.pins == 1
