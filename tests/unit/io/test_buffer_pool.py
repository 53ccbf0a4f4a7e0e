"""A buffer pool: bytes are in memory while pinned, go when others need room, are never wrong."""

from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import DamageError, DirectoryError, PoisonedError
from tensorstow.io.arena import Arena
from tensorstow.io.buffer_pool import BufferPool, PooledBuffer

SIZE = 1 << 20


def _fill(buffer: PooledBuffer, value: int) -> None:
    buffer.pin(for_write=True)
    buffer.bytes.fill_(value)
    buffer.unpin(dirty=True)


def _all_are(buffer: PooledBuffer, value: int) -> bool:
    buffer.pin()
    try:
        return bool((buffer.bytes == value).all())
    finally:
        buffer.unpin()


def test_bytes_come_back_as_they_were_written_within_the_capacity(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 4 * SIZE, 2 * SIZE)
    made = [pool.add(SIZE) for _ in range(4)]
    for value, buffer in enumerate(made):
        _fill(buffer, value + 1)
    assert all(_all_are(buffer, value + 1) for value, buffer in enumerate(made))
    assert pool.high_water_bytes == 2 * SIZE
    assert pool.bytes_written == 4 * SIZE
    assert pool.bytes_read == 4 * SIZE


def test_what_is_in_memory_is_not_read_again(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, SIZE, SIZE)
    buffer = pool.add(SIZE)
    _fill(buffer, 7)
    assert _all_are(buffer, 7)
    assert pool.bytes_read == 0


def test_pages_are_given_back(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 2 * SIZE, SIZE)
    first, second = pool.add(SIZE), pool.add(SIZE)
    _fill(first, 3)
    _fill(second, 4)
    assert not first.present
    assert int(first.bytes[0]) == 0  # not its bytes: a page of zeros


def test_a_lease_keeps_its_bytes_whatever_the_capacity(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 3 * SIZE, SIZE)
    made = [pool.add(SIZE) for _ in range(3)]
    for value, buffer in enumerate(made):
        _fill(buffer, value + 1)
    for buffer in made:
        buffer.pin()
    assert [int(buffer.bytes[0]) for buffer in made] == [1, 2, 3]
    assert pool.held_bytes == 3 * SIZE


def test_what_fits_leaves_room_for_one_more(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 4 * SIZE, 3 * SIZE)
    made = [pool.add(SIZE) for _ in range(4)]
    assert made[0].can_pin(2 * SIZE)
    assert not made[0].can_pin(2 * SIZE + 1)
    made[1].pin()
    assert made[0].can_pin(SIZE)
    made[2].pin()
    assert not made[0].can_pin(SIZE)
    made[1].unpin()
    assert made[0].can_pin(SIZE)  # what is there and not pinned makes room


def test_reading_ahead_takes_no_memory_from_a_lease(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 4 * SIZE, 3 * SIZE)
    made = [pool.add(SIZE) for _ in range(4)]
    for value, buffer in enumerate(made):
        _fill(buffer, value + 1)
    pool.synchronize()
    for buffer in made[:3]:
        buffer.pin()
    made[2].expect([made[3]])
    assert not made[3].present
    for buffer in made[:3]:
        buffer.unpin()
    made[2].expect([made[3]])
    assert [buffer.present for buffer in made] == [False, True, True, True]


def test_reading_ahead_takes_no_memory_from_the_two_used_last(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 3 * SIZE, 2 * SIZE)
    made = [pool.add(SIZE) for _ in range(3)]
    for value, buffer in enumerate(made):
        _fill(buffer, value + 1)
    pool.synchronize()
    made[2].expect([made[0]])
    assert [buffer.present for buffer in made] == [False, True, True]


def test_a_change_is_written_when_the_last_lease_ends(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, SIZE, SIZE)
    buffer = pool.add(SIZE)
    buffer.pin()
    buffer.pin(for_write=True)
    buffer.unpin(dirty=True)
    assert pool.bytes_written == 0
    buffer.unpin()
    assert pool.bytes_written == SIZE


def test_other_bytes_on_disk_are_damage_and_nobody_goes_on(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 2 * SIZE, SIZE)
    first, second = pool.add(SIZE), pool.add(SIZE)
    _fill(first, 1)
    _fill(second, 2)
    pool.synchronize()
    block = torch.zeros(4096, dtype=torch.uint8)
    pool._file.write(block, first.offset + 8192).wait()
    with pytest.raises(DamageError, match="checksum"):
        first.pin()
    with pytest.raises(PoisonedError, match="resume"):
        second.pin()
    written, second.pins = pool.bytes_written, 1
    second.unpin(dirty=True)  # what has to be let go of is, and is not written
    assert (second.pins, pool.bytes_written) == (0, written)


def test_too_little_room_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError):
        BufferPool(tmp_path, 1 << 60, SIZE)


def test_a_capacity_that_changes_takes_and_gives_memory(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 4 * SIZE, 2 * SIZE, SIZE)
    made = [pool.add(SIZE) for _ in range(4)]
    pool.resize(100 * SIZE)
    assert (pool.capacity, pool.total_bytes) == (4 * SIZE, 4 * SIZE)
    for value, buffer in enumerate(made):
        _fill(buffer, value + 1)
    pool.synchronize()
    assert pool.held_bytes == 4 * SIZE
    pool.resize(0)
    assert pool.capacity == SIZE
    assert pool.held_bytes == 2 * SIZE  # the two used last stay until there is no room
    assert all(_all_are(buffer, value + 1) for value, buffer in enumerate(made))
    assert pool.held_bytes == SIZE


def test_what_is_expected_loses_no_memory_to_what_is_needed_later(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 6 * SIZE, 4 * SIZE)
    made = [pool.add(SIZE) for _ in range(6)]
    for value, buffer in enumerate(made):
        _fill(buffer, value + 1)
        pool.synchronize()
    assert [buffer.present for buffer in made] == [False, False, True, True, True, True]
    made[5].expect([made[2], made[3], made[1]])
    assert [buffer.present for buffer in made] == [False, False, True, True, True, True]
    made[5].expect([made[3], made[1], made[0]])
    assert [buffer.present for buffer in made] == [True, True, False, True, False, True]
    made[0].pin()
    made[2].pin()
    made[4].pin()  # what is expected has to give room: what is needed later goes first
    assert [buffer.present for buffer in made] == [True, False, True, True, True, False]
    assert pool.bytes_read == 4 * SIZE


def test_what_had_no_room_is_read_when_there_is_some(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 5 * SIZE, 3 * SIZE)
    made = [pool.add(SIZE) for _ in range(5)]
    for value, buffer in enumerate(made):
        _fill(buffer, value + 1)
    pool.synchronize()
    for buffer in made[2:]:
        buffer.pin()
    made[4].expect([made[0], made[1]])
    assert pool.bytes_read == 0
    made[2].unpin()
    assert [buffer.present for buffer in made] == [True, False, False, True, True]
    made[0].pin()
    made[3].unpin()
    assert [buffer.present for buffer in made] == [True, True, False, False, True]


@pytest.mark.parametrize("moves", [True, False])
def test_pages_of_what_is_evicted_go_to_what_is_read_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, moves: bool
) -> None:
    taken = []
    take = Arena.take_pages

    def counted(self: Arena, other: Arena) -> bool:
        taken.append(moves and take(self, other))
        return taken[-1]

    monkeypatch.setattr(Arena, "take_pages", counted)
    pool = BufferPool(tmp_path, 5 * SIZE, 2 * SIZE)
    made = [pool.add(SIZE) for _ in range(3)] + [pool.add(2 * SIZE)]
    for value, buffer in enumerate(made):
        _fill(buffer, value + 1)
    assert not taken  # what was never written is zeros
    for _ in range(2):
        assert all(_all_are(buffer, value + 1) for value, buffer in enumerate(made))
    # By the second and third for the one before last; the large one and its followers are unlike.
    assert taken == [moves] * 2
    assert [int(buffer.bytes[0]) for buffer in made] == [0, 0, 0, 4]
    pool.close()
    assert [int(buffer.bytes[-1]) for buffer in made] == [0, 0, 0, 0]
