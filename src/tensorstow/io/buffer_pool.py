"""A buffer pool for tensors on disk: read when pinned, written back when dirty.

[Note: A buffer's memory] Each buffer has a fixed range of addresses, and pages only while its bytes
are needed: they are read in place, and the pages are freed afterwards, or moved to the buffer that
needs the room. So a weight has one address for the optimizer's kernels at all times.

    absent --fetch--> reading --pin--> present --(unpinned, least recently used)--> absent
    when the last pin of dirty bytes ends they are written, and evicted only when they are on disk

The memory of all buffers stays within a capacity, unless more than that is pinned at once.

[Note: Expected buffers] Those that are used next are read in their order, each as soon as there is
room. None of them loses its memory to one that is needed later: it would be read twice.
"""

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, PoisonedError
from tensorstow.base.sizes import round_up
from tensorstow.io.arena import Arena
from tensorstow.io.engine import open_engine
from tensorstow.io.files import ALIGN, IoFuture, backend_for, scratch_file
from tensorstow.io.transfer_log import LoggedTransfer, TransferLog

_KEPT = 2


class PooledBuffer:
    """Tensors that move as one: on disk, and in memory while they are pinned."""

    def __init__(self, pool: "BufferPool", nbytes: int, offset: int) -> None:
        """Take ``nbytes`` of the file from ``offset``; hold none of its memory yet."""
        self.nbytes = nbytes
        self.offset = offset
        self.pool = pool
        self._arena = Arena(nbytes, in_children=False)
        self.bytes = self._arena.tensor(0, nbytes, torch.uint8)
        self.pins = 0
        self.present = False
        self.dirty = False
        self.reading: IoFuture | None = None
        self.writing: IoFuture | None = None
        self.begun = 0.0
        """When the transfer under way began, by ``time.monotonic()``; while there is a log."""
        self.seen_over: float | None = None
        """When it was seen to be over."""
        self.checksum: int | None = None
        """Of what is on disk; None: nothing was ever written."""

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over the bytes from ``at``, to be used while pinned alone.

        Each has a version counter of its own.
        """
        return self._arena.tensor(at, torch.Size(shape).numel(), dtype).view(shape)

    def expect(self, following: "Sequence[PooledBuffer]") -> None:
        """Read what is used after this buffer, in its order, as soon as there is room."""
        self.pool.expect([each for each in dict.fromkeys(following) if each is not self])

    def is_ready(self) -> bool:
        """Return whether a pin would wait for nothing."""
        return self.pool.is_ready(self)

    def pin(self, *, for_write: bool = False) -> None:
        """Return when the bytes are in memory; they stay until ``unpin``.

        Raises TransferError or DamageError where they cannot be read as they were written.
        """
        self.pool.pin(self, for_write=for_write)

    def can_pin(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more can be pinned, keeping room for the largest buffer."""
        return self.pool.can_pin(nbytes)

    def unpin(self, *, dirty: bool = False) -> None:
        """End a pin; ``dirty``: the bytes are to be written back."""
        self.pool.unpin(self, dirty=dirty)

    def drop_pages(self) -> None:
        """Give the memory back."""
        self._arena.drop()

    def take_pages(self, other: "PooledBuffer") -> None:
        """Have the memory of a buffer of the same size, where the kernel can move it."""
        if not self._arena.take_pages(other._arena):  # noqa: SLF001  # of its own class
            other.drop_pages()


class BufferPool:
    """Buffers in one file, and a bound on the memory that they take."""

    def __init__(self, directory: Path, nbytes: int, capacity: int, least: int = 0) -> None:
        """Make a file of ``nbytes`` without a name; hold up to ``capacity`` bytes in memory.

        ``least`` is what ``resize`` leaves. Raises DirectoryError where the directory has no room.
        """
        self.directory = directory
        self._file = scratch_file(open_engine(backend_for([directory])), directory, nbytes)
        weakref.finalize(self, self._file.close)
        self.capacity, self._least = capacity, least
        """The bytes that may be held in memory."""
        self.total_bytes = self._largest = 0
        self._recent: dict[PooledBuffer, None] = {}
        self._expected: list[PooledBuffer] = []
        """What is used next, in order ([Note: Expected buffers])."""
        self._unread: list[PooledBuffer] = []
        """Those of them that there was no room for yet."""
        self._evicted: list[PooledBuffer] = []
        """Those whose pages the next one may have; none outside of a call."""
        self._lock = threading.RLock()
        self._failure: BaseException | None = None
        self.held_bytes = 0
        self.high_water_bytes = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self._log: TransferLog | None = None

    def log_to(self, log: TransferLog | None) -> None:
        """Log transfers from now on, and waits for them as stalls; None: log no more.

        A transfer without a wait is logged at the pool's next call.
        """
        with self._lock:
            self._log = log

    def resize(self, capacity: int) -> None:
        """Hold up to ``capacity`` bytes from now on, at least ``least`` and at most all buffers."""
        with self._poisoning():
            self.capacity = max(min(capacity, self.total_bytes), self._least)
            self._make_room(0, wait=False)

    def add(self, nbytes: int) -> PooledBuffer:
        """Return a buffer of zeros, of ``nbytes`` rounded up."""
        buffer = PooledBuffer(self, round_up(nbytes, ALIGN), self.total_bytes)
        self.total_bytes += buffer.nbytes
        self._largest = max(self._largest, buffer.nbytes)
        return buffer

    def expect(self, buffers: Sequence[PooledBuffer]) -> None:
        """Read ``buffers``, which are used next in this order, as soon as there is room."""
        with self._poisoning():
            self._expected, self._unread = list(buffers), list(buffers)
            self._read_expected()

    def is_ready(self, buffer: PooledBuffer) -> bool:
        """Return whether ``buffer`` is in memory, and read."""
        with self._lock:
            return buffer.present and (buffer.reading is None or buffer.reading.done())

    def pin(self, buffer: PooledBuffer, *, for_write: bool) -> None:
        """Return when the bytes of ``buffer`` are in memory and will stay."""
        with self._poisoning():
            if not buffer.present:
                self._make_room(buffer.nbytes, wait=True)
                self._bring(buffer)
            buffer.pins += 1
            self._touch(buffer)
            self._end_read(buffer)
            if for_write:
                self._end_write(buffer)

    def can_pin(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more can be pinned, keeping room for the largest buffer."""
        with self._lock:
            pinned = sum(buffer.nbytes for buffer in self._recent if buffer.pins)
            return pinned + nbytes + self._largest <= self.capacity

    def unpin(self, buffer: PooledBuffer, *, dirty: bool) -> None:
        """End a pin; begin writing ``dirty`` bytes when it was the last one.

        Where the pool has failed nothing is written: whoever pins anything is told.
        """
        with self._lock:
            if self._failure is not None:
                buffer.pins -= 1
                return
        with self._poisoning():
            buffer.pins -= 1
            buffer.dirty |= dirty
            if buffer.pins == 0 and buffer.dirty:
                self._end_write(buffer)
                buffer.dirty = False
                buffer.checksum = _native.checksum(buffer.bytes.data_ptr(), buffer.nbytes)
                buffer.begun, buffer.seen_over = time.monotonic(), None
                buffer.writing = self._file.write(buffer.bytes, buffer.offset)
                self.bytes_written += buffer.nbytes
            self._read_expected()

    def synchronize(self) -> None:
        """Return when nothing is under way; raises what failed."""
        with self._poisoning():
            for buffer in self._recent:
                self._end_read(buffer)
                self._end_write(buffer)

    def close(self) -> None:
        """Let file and memory go. Idempotent."""
        with self._lock:
            self._file.close()
            for buffer in list(self._recent):
                self._drop(buffer)
                buffer.drop_pages()

    def _read_expected(self) -> None:
        """Begin reading what is expected, as far as there is room; each of it once."""
        while self._unread:
            buffer = self._unread[0]
            nearer = self._expected[: self._expected.index(buffer)]
            if not buffer.present:
                if not self._make_room(buffer.nbytes, wait=False, keep=nearer):
                    return
                self._bring(buffer)
            del self._unread[0]

    def _bring(self, buffer: PooledBuffer) -> None:
        buffer.present = True
        self._touch(buffer)
        self.held_bytes += buffer.nbytes
        self.high_water_bytes = max(self.high_water_bytes, self.held_bytes)
        _reuse_pages(self._evicted, None if buffer.checksum is None else buffer)
        if buffer.checksum is not None:
            buffer.begun, buffer.seen_over = time.monotonic(), None
            buffer.reading = self._file.read(buffer.bytes, buffer.offset)
            self.bytes_read += buffer.nbytes

    def _touch(self, buffer: PooledBuffer) -> None:
        self._recent.pop(buffer, None)
        self._recent[buffer] = None

    def _end_read(self, buffer: PooledBuffer) -> None:
        if buffer.reading is None:
            return
        reading, buffer.reading = buffer.reading, None
        self._wait(reading, buffer, "read")
        if _native.checksum(buffer.bytes.data_ptr(), buffer.nbytes) != buffer.checksum:
            message = (
                f"read of {buffer.nbytes} bytes at offset {buffer.offset} of {self._file.path} gave"
                " other weights than were written there: their checksum does not fit. Look at"
                " `dmesg` and the drive's health; go on from the last commit."
            )
            raise DamageError(message)

    def _end_write(self, buffer: PooledBuffer) -> None:
        if buffer.writing is not None:
            writing, buffer.writing = buffer.writing, None
            self._wait(writing, buffer, "written")

    def _wait(self, transfer: IoFuture, buffer: PooledBuffer, what: str) -> None:
        log = self._log
        if log is None:
            transfer.wait()
            return
        since = time.monotonic()
        transfer.wait()
        over = buffer.seen_over
        end = time.monotonic() if over is None else over
        lane = f"weights {what} ({self.directory})"
        log.add(LoggedTransfer(lane, f"weights {what}", buffer.begun, end, buffer.nbytes))
        if over is None:
            log.add(LoggedTransfer("stall", f"weights being {what}", since, end))

    def _make_room(self, nbytes: int, *, wait: bool, keep: Sequence[PooledBuffer] = ()) -> bool:
        """Evict the least recently used buffers until ``nbytes`` more fit; return whether they do.

        What is still being written is waited for, or without ``wait`` passed over, as are the two
        used last: in a backward, one is computed with and the other will be updated. What is
        expected goes after all others, the last one first, and none of ``keep``.
        """
        oldest = list(self._recent)
        found = [each for each in (oldest if wait else oldest[:-_KEPT]) if each not in keep]
        ranks = {each: rank for rank, each in enumerate(reversed(self._expected), start=1)}
        for buffer in sorted(found, key=lambda each: ranks.get(each, 0)):
            if self.held_bytes + nbytes <= self.capacity:
                break
            busy = buffer.reading or (buffer.writing is not None and not buffer.writing.done())
            if buffer.pins or (busy and not wait):
                continue
            self._end_read(buffer)
            self._end_write(buffer)
            self._drop(buffer)
            self._evicted.append(buffer)
        return self.held_bytes + nbytes <= self.capacity

    def _drop(self, buffer: PooledBuffer) -> None:
        del self._recent[buffer]
        buffer.present = False
        self.held_bytes -= buffer.nbytes

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Hold the lock; poison the pool on any error, after which weights are unknown."""
        with self._lock:
            if self._failure is not None:
                message = (
                    f"Weights on disk failed before: {self._failure} Make the model anew and"
                    " resume() the last commit."
                )
                raise PoisonedError(message) from self._failure
            now = time.monotonic()
            for buffer in () if self._log is None else self._recent:
                for transfer in (buffer.reading, buffer.writing):
                    if transfer is not None and buffer.seen_over is None and transfer.done():
                        buffer.seen_over = now
            try:
                yield
            except BaseException as error:
                self._failure = error
                raise
            finally:
                _reuse_pages(self._evicted, None)


def _reuse_pages(evicted: list[PooledBuffer], reader: PooledBuffer | None) -> None:
    """Give a buffer that is about to be read the pages of one of its size; drop all others'."""
    for other in evicted:
        if reader is not None and reader is not other and reader.nbytes == other.nbytes:
            reader.take_pages(other)
            reader = None
        else:
            other.drop_pages()
    evicted.clear()
