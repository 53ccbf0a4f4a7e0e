"""What a buffer pool does beyond its serial reference: threads, pages, damage."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

from tensorstow.base.errors import DamageError, DirectoryError, PoisonedError
from tensorstow.io.arena import Arena
from tensorstow.io.file_runs import Run
from tensorstow.io.files import IoFuture
from tensorstow.memory.buffer_pool import BufferPool, PooledBuffer, _begin_read

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


@pytest.mark.parametrize("awaits", ["its read", "the write of what leaves"])
def test_a_thread_that_waits_for_the_disk_keeps_no_other_from_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, awaits: str
) -> None:
    pool = BufferPool([tmp_path], 3 * SIZE, 2 * SIZE)
    first, second, third = [pool.add(SIZE) for _ in range(3)]
    for value, buffer in enumerate((third, second, first)):
        _fill(buffer, value + 1)
    if awaits == "its read":
        pool.synchronize()
    first.pin()
    is_waiting, may_end, done, wait = Event(), Event(), IoFuture.done, IoFuture.wait

    def late(future: IoFuture) -> None:
        is_waiting.set()
        assert may_end.wait(10)
        wait(future)

    monkeypatch.setattr(IoFuture, "done", lambda future: may_end.is_set() and done(future))
    monkeypatch.setattr(IoFuture, "wait", late)
    with ThreadPoolExecutor(2) as threads:
        pinned = threads.submit(third.pin)
        assert is_waiting.wait(10)
        try:
            assert threads.submit(first.is_ready).result(timeout=5)
            threads.submit(first.pin).result(timeout=5)
            assert not threads.submit(third.is_ready).result(timeout=5)
        finally:
            may_end.set()
        pinned.result(timeout=10)
    assert third.is_ready()
    assert int(third.bytes[0]) == 1
    first.unpin()
    assert (first.pins, third.pins) == (1, 1)


def test_pages_are_given_back(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 2 * SIZE, SIZE)
    first, second = pool.add(SIZE), pool.add(SIZE)
    _fill(first, 3)
    _fill(second, 4)
    assert not first.is_in_memory
    assert int(first.bytes[0]) == 0  # not its bytes: a page of zeros


def test_other_bytes_on_disk_are_damage_and_nobody_goes_on(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 2 * SIZE, SIZE)
    first, second = pool.add(SIZE), pool.add(SIZE)
    _fill(first, 1)
    _fill(second, 2)
    pool.synchronize()
    block = torch.zeros(4096, dtype=torch.uint8)
    pool._files._files[0].write(block, first.place.stripes[0].offset + 8192).wait()
    with pytest.raises(DamageError, match="checksum"):
        first.pin()
    with pytest.raises(PoisonedError, match="resume"):
        second.pin()
    written, second.pins = pool.bytes_written, 1
    second.unpin(dirty=True)  # what has to be let go of is, and is not written
    assert (second.pins, pool.bytes_written) == (0, written)


def test_too_little_room_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError):
        BufferPool([tmp_path], 1 << 60, SIZE)


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
    pool = BufferPool([tmp_path], 5 * SIZE, 2 * SIZE)
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


def test_all_leaves_memory_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BufferPool([tmp_path], 4 * SIZE, 4 * SIZE, least=3 * SIZE)
    buffers = [pool.add(SIZE) for _ in range(4)]
    ended: set[IoFuture] = set()
    wait = IoFuture.wait

    def late(future: IoFuture) -> None:
        wait(future)
        ended.add(future)

    monkeypatch.setattr(IoFuture, "done", lambda future: future in ended)
    monkeypatch.setattr(IoFuture, "wait", late)
    for value, buffer in enumerate(buffers):
        _fill(buffer, value + 1)
    pool.resize(0)
    assert pool.memory.held == 4 * SIZE  # all are being written
    pool.resize(0, least=0)
    assert (pool.memory.held, pool.memory.capacity) == (0, 0)
    assert ended
    assert all(_all_are(buffer, value + 1) for value, buffer in enumerate(buffers))
    assert pool.memory.held == SIZE
    pool.resize(4 * SIZE)
    assert pool.memory.capacity == 4 * SIZE


class LateRead:
    """A read that is over once it has been waited for."""

    def __init__(self) -> None:
        self.is_over = False

    def done(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.is_over = True


class LateFile:
    """A file of zeros whose reads are late."""

    path = Path("late")

    def read(self, offset: int, into: torch.Tensor) -> LateRead:
        del offset
        into.zero_()
        return LateRead()

    def validate_unchanged(self) -> None:
        """Nobody writes to it."""


def test_a_pin_settles_no_read_that_another_thread_has_begun_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BufferPool([tmp_path], 2 * SIZE, SIZE)
    runs = [Run(LateFile(), at, at, SIZE // 2) for at in (0, SIZE // 2)]
    buffer = pool.add(SIZE, runs, pieces=[[run] for run in runs])
    buffer.upcoming = frozenset({0})
    wait, settle, waits = pool._wait, pool._settle, []

    def wait_while_another_reads(awaited: PooledBuffer) -> None:
        wait(awaited)
        waits.append(awaited)
        if len(waits) == 1:  # as `read` does
            settle(awaited)
            _begin_read(pool._files, awaited, [1])

    def settle_what_is_over(settled: PooledBuffer) -> None:
        assert settled.is_over()
        settle(settled)

    monkeypatch.setattr(pool, "_wait", wait_while_another_reads)
    monkeypatch.setattr(pool, "_settle", settle_what_is_over)
    buffer.pin(whole=False)
    assert buffer.present == {0, 1}
    assert len(waits) == 2
    buffer.unpin()


def test_kept_bytes_take_the_room_of_two_places(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 4 * SIZE, 2 * SIZE)
    first, second = pool.add(SIZE), pool.add(SIZE)
    _fill(first, 1)
    for value in range(2, 20):
        before = int(value) - 1
        first.keep()
        _fill(first, 100)
        _fill(first, value)
        _fill(second, value)
        if value % 3 == 0:
            first.put_back()
            assert _all_are(first, before)
            _fill(first, value)
        first.confirm()
        assert _all_are(first, value)
    # Two places of the first buffer, and one of the second.
    assert sum(pool._files._ends) == 3 * SIZE


def test_a_reader_finds_kept_bytes_where_it_has_pinned_them(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 4 * SIZE, 2 * SIZE)
    stored, blank = pool.add(SIZE), pool.add(SIZE)
    _fill(stored, 1)
    for buffer, before in ((stored, 1), (blank, 0)):
        buffer.keep()
        _fill(buffer, 2)
        buffer.pin()
        buffer.put_back()
        assert bool((buffer.bytes == before).all())
        buffer.unpin()


def test_bytes_that_were_kept_in_memory_alone_are_read_again(tmp_path: Path) -> None:
    """An update was undone while its weight was pinned: nothing was written."""
    pool = BufferPool([tmp_path], 2 * SIZE, SIZE)
    buffer = pool.add(SIZE)
    _fill(buffer, 1)
    buffer.keep()
    buffer.pin(for_write=True)
    buffer.bytes.fill_(2)
    buffer.unpin()
    buffer.put_back()
    assert _all_are(buffer, 1)
    assert sum(pool._files._ends) == SIZE


def test_bytes_of_files_are_kept_where_they_are(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 0, SIZE)
    buffer = pool.add(SIZE, runs=[Run(LateFile(), 0, 0, SIZE)])
    for _ in range(2):
        buffer.keep()
        _fill(buffer, 8)
        assert not buffer.is_in_files
        buffer.put_back()
        assert buffer.is_in_files
        assert _all_are(buffer, 0)
    assert sum(pool._files._ends) == SIZE
    _fill(buffer, 9)
    assert _all_are(buffer, 9)
