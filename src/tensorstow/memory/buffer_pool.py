"""A buffer pool for tensors on disk: read when pinned, written back when dirty.

[Note: A buffer's memory] Each buffer has a fixed range of addresses, and pages only while its bytes
are needed: they are read in place, and the pages are freed afterwards, or moved to the buffer that
needs the room. So a weight has one address for the optimizer's kernels at all times.

The states are those of ``MovingBytes``: a read is settled by the first pin, and a write begins when
the last pin of dirty bytes ends. Bytes that are not pinned leave when others need the room.

The pool's lock is never held while a transfer is waited for: other threads pin other buffers then.

The memory of all buffers stays within a capacity, unless more than that is pinned at once.

[Note: Expected buffers] Those that are used next are read in their order, each as soon as there is
room. None of them loses its memory to one that is needed later: it would be read twice.

[Note: Files that are only read] A buffer of frozen weights may have its bytes in the user's files.
It takes no room in the pool's own file, and is read from the user's. Dirty bytes never go to the
user's files: the whole buffer then gets room in the pool's file, and is like any other.

[Note: Pieces] A buffer of bytes in files may have pieces, which are read one by one: a pin that is
not ``whole`` reads those that are ``upcoming``, and ``read`` others that are used. If pieces are
upcoming, the buffer is read ahead.

[Note: Decoders] Files may have weights as codes. A decoder computes the values, in the same buffer,
when a read is settled. Codes that stay in host memory need no read.

[Note: Kept bytes] An update that may be undone must leave the old weight somewhere. ``keep`` leaves
it on disk: the next writes go to a second place, and the two places change roles in ``confirm``.
So keeping takes no memory, and no time unless the bytes are put back, which reads them again.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, OptionError
from tensorstow.base.health import Health
from tensorstow.base.sizes import format_bytes, round_up
from tensorstow.io.allocator import check_memory_limit, fits_memory_limit, memory_limit
from tensorstow.io.arena import Arena
from tensorstow.io.file_runs import Run
from tensorstow.io.files import ALIGN
from tensorstow.io.scratch import FileStripe, StripedFiles
from tensorstow.io.transfer_log import LoggedTransfer, TransferLog
from tensorstow.memory.bounded_bytes import BoundedBytes
from tensorstow.memory.moving_bytes import ByteState, MovingBytes
from tensorstow.memory.use_order import in_order_of_leaving

logger = logging.getLogger("tensorstow")
_FORKED = (
    "Weights on disk were used in a forked process: buffers and files belong to the parent. Make"
    " the model in the process that uses it."
)
_FAILED = "Weights on disk failed before: {} Make the model anew and resume() the last commit."
_WROTE_TO_PIECES = (
    "Frozen experts on disk were written to during a call that had only those in memory that tokens"
    " were routed to: the others would lack the change. Write to them before stow(), or while their"
    " module is not called."
)
_KEPT = 2


class Decoder(Protocol):
    """Computes the values of weights that files have as codes ([Note: Decoders])."""

    held_bytes: int
    """Bytes of codes that stay in host memory."""

    def decode(
        self,
        memory: Callable[[int, int, torch.dtype], torch.Tensor],
        pieces: Sequence[int] | None,
    ) -> None:
        """Compute them in a buffer: ``memory`` has elements by their place, number and dtype.

        ``pieces``: of these alone; None: all.
        """


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Where the bytes of a buffer are when they have no memory."""

    stripes: Sequence[FileStripe] = ()
    """Parts of the pool's files."""
    runs: Sequence[Run] = ()
    """Bytes of files that are only read; none: they are in the pool's files."""
    decoder: Decoder | None = None
    """Computes values of what was read; None: they are read as they are."""
    pieces: Sequence[Sequence[Run]] = ()
    """The reads of each piece ([Note: Pieces]); none: it is read as one."""
    checksum: int | None = None
    """The checksum of bytes in the pool's files; None: they were never written."""

    @property
    def is_in_files(self) -> bool:
        """Return whether the bytes are of files that are only read."""
        return bool(self.runs) or self.decoder is not None


class PooledBuffer(MovingBytes):
    """Tensors that move as one: on disk, and in memory while they are pinned."""

    def __init__(self, pool: "BufferPool", nbytes: int, place: StoredBytes) -> None:
        """Have the bytes of ``place``; hold none of the pool's memory yet."""
        super().__init__()
        self.nbytes = nbytes
        self.place = place
        self.is_keeping = False
        """Whether the next writes go to another place ([Note: Kept bytes])."""
        self.old: StoredBytes | None = None
        """The place of the bytes that are kept; None: nothing was written since ``keep``."""
        self.spare: Sequence[FileStripe] = ()
        """The second place, when nobody uses it; none: it has none yet."""
        self.present: set[int] = set()
        """The pieces that are in memory, or are being read."""
        self.upcoming: frozenset[int] = frozenset()
        """The pieces that its next use is known to need."""
        self.fresh: Sequence[int] = ()
        """The pieces that were read last."""
        self.pool = pool
        self._arena = Arena(nbytes, in_children=False, on_demand=True)
        self.bytes = self._arena.tensor(0, nbytes, torch.uint8)
        self.pins = 0
        self.dirty = False
        self.begun = 0.0
        """When the transfer under way began, by ``time.monotonic()``; while there is a log."""
        self.seen_over: float | None = None
        """When it was seen to be over."""
        self.moving = 0
        """The bytes of the last transfer."""

    @property
    def pieces(self) -> Sequence[Sequence[Run]]:
        """Return the reads of each piece ([Note: Pieces]); none: it is read as one."""
        return self.place.pieces

    @property
    def decoder(self) -> Decoder | None:
        """Return what computes the values of what was read; None: they are read as they are."""
        return self.place.decoder

    @property
    def is_in_files(self) -> bool:
        """Return whether the bytes are of files that are only read."""
        return self.place.is_in_files

    @property
    def file_bytes(self) -> int:
        """Return the bytes that are read from files that are only read, each time."""
        return sum(run.nbytes for run in self.place.runs)

    @property
    def is_stored(self) -> bool:
        """Return whether there is something to read."""
        return self.is_in_files or self.place.checksum is not None

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over the bytes from ``at``, to be used while pinned alone.

        Each has a version counter of its own.
        """
        return self._arena.tensor(at, torch.Size(shape).numel(), dtype).view(shape)

    def decode(self) -> None:
        """Compute the values of codes that were read; no-op if there are none."""
        if self.decoder is not None:
            self.decoder.decode(self._arena.tensor, self.fresh if self.pieces else None)

    def expect(self, following: "Sequence[PooledBuffer]") -> None:
        """Read what is used after this buffer, in its order, as soon as there is room."""
        self.pool.expect([buffer for buffer in dict.fromkeys(following) if buffer is not self])

    def is_ready(self) -> bool:
        """Return whether a pin would wait for nothing; takes no lock."""
        if self.state is ByteState.READING:
            return self.is_over()
        return self.is_in_memory

    def pin(self, *, for_write: bool = False, whole: bool = True) -> None:
        """Return when the bytes are in memory; they stay until ``unpin``.

        Without ``whole`` a buffer with pieces has those alone that were read. Raises TransferError
        or DamageError if they cannot be read as they were written.
        """
        self.pool.pin(self, for_write=for_write, whole=whole)

    def read(self, pieces: Iterable[int]) -> None:
        """Return when these pieces of a pinned buffer are in memory; no-op if it has none."""
        self.pool.read(self, pieces)

    def can_pin(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more can be pinned, keeping room for the largest buffer."""
        return self.pool.can_pin(nbytes)

    def unpin(self, *, dirty: bool = False) -> None:
        """End a pin; ``dirty``: the bytes are to be written back."""
        self.pool.unpin(self, dirty=dirty)

    def keep(self) -> None:
        """Keep the bytes on disk as they are now, until ``put_back`` or ``confirm``.

        Nobody may be writing to the bytes in memory. Bytes that were kept before are given up.
        """
        if self.dirty:
            message = "Bytes were to be kept that were changed, and are not written yet."
            raise AssertionError(message)
        self.confirm()
        self.is_keeping = True

    def put_back(self) -> None:
        """Have the bytes again that ``keep`` has kept, also where the buffer is pinned.

        Nobody may be writing to them. Raises the errors of ``pin``.
        """
        self.pool.put_back(self)

    def confirm(self) -> None:
        """Keep the new bytes and not the old ones. No-op if none are kept."""
        self.is_keeping = False
        if self.old is not None:
            self.spare, self.old = self.old.stripes, None

    def drop_pages(self) -> None:
        """Give the memory back."""
        self._arena.drop()

    def take_pages(self, other: "PooledBuffer") -> None:
        """Have the memory of a buffer of the same size, where the kernel can move it."""
        if not self._arena.take_pages(other._arena):  # noqa: SLF001  # of its own class
            other.drop_pages()


class BufferPool:
    """Buffers in a file of each directory, and a bound on the memory that they take."""

    def __init__(
        self, directories: Sequence[Path], nbytes: int, capacity: int, least: int = 0
    ) -> None:
        """Make files of ``nbytes`` without names; hold up to ``capacity`` bytes in memory.

        ``least`` is what ``resize`` leaves. Raises DirectoryError if a directory has no room.
        """
        self._files = StripedFiles(directories, nbytes)
        self.directory = self._files.directories[0]
        self._where = ", ".join(map(str, self._files.directories))
        # A finalizer keeps what it calls alive: that is the files, and not the pool.
        weakref.finalize(self, self._files.close)
        self.memory, self._least = BoundedBytes(capacity), least
        """The bytes of the buffers in memory."""
        self.total_bytes = 0
        self._buffers: list[PooledBuffer] = []
        self._recent: dict[PooledBuffer, None] = {}
        self._expected: list[PooledBuffer] = []
        """What is used next, in order ([Note: Expected buffers])."""
        self._unread: list[PooledBuffer] = []
        """The expected buffers that had no room yet."""
        self._evicted: list[PooledBuffer] = []
        """Those whose pages the next one may have; none outside of a call."""
        self._lock = threading.RLock()
        self._health = Health(_FORKED, _FAILED)
        self.bytes_read = 0
        self.bytes_written = 0
        self._log: TransferLog | None = None

    def log_to(self, log: TransferLog | None) -> None:
        """Log transfers from now on, and waits for them as stalls; None: log no more.

        A transfer without a wait is logged at the pool's next call.
        """
        with self._lock:
            self._log = log

    def resize(self, capacity: int, *, least: int | None = None) -> None:
        """Hold up to ``capacity`` bytes from now on, at least ``least`` and at most all buffers.

        ``least`` is the constructor's by default. With 0 those used last leave too, once they are
        read or written.
        """
        floor = self._least if least is None else least
        while True:
            with self._poisoning():
                self.memory.capacity = max(min(capacity, self.total_bytes), floor)
                busy = self._make_room(0, at_once=least == 0)
            if busy is None:
                return
            self._wait(busy)

    def add(
        self,
        nbytes: int,
        runs: Sequence[Run] = (),
        decoder: Decoder | None = None,
        pieces: Sequence[Sequence[Run]] = (),
    ) -> PooledBuffer:
        """Return a buffer of ``nbytes`` rounded up: of zeros, or of what ``runs`` have.

        ``runs``: bytes of files that are only read ([Note: Files that are only read]);
        ``decoder``: as in [Note: Decoders]; ``pieces``: those of ``runs``, as in [Note: Pieces].
        """
        padded = round_up(nbytes, ALIGN)
        is_own = not runs and decoder is None
        stripes = self._files.allocate(padded) if is_own else []
        place = StoredBytes(stripes, tuple(runs), decoder, tuple(pieces))
        buffer = PooledBuffer(self, padded, place)
        self.total_bytes += buffer.nbytes
        self._buffers.append(buffer)
        return buffer

    def expect(self, buffers: Sequence[PooledBuffer]) -> None:
        """Read ``buffers``, which are used next in this order, as soon as there is room."""
        with self._poisoning():
            # Two lists: buffers leave ``_unread`` as they are read.
            self._expected, self._unread = list(buffers), list(buffers)
            self._read_expected()

    def pin(self, buffer: PooledBuffer, *, for_write: bool, whole: bool = True) -> None:
        """Return when the bytes of ``buffer`` are in memory and will stay.

        Raises BudgetError, and changes nothing, if the limit of memory has no room for them.
        """
        # If it does not fit, others leave for it, and the process takes no more memory.
        is_new = not buffer.is_in_memory and self.memory.fits(buffer.nbytes)
        if is_new and not _fits_limit(self._recent, buffer.nbytes):
            with self._lock:  # hold no more than now: others leave for it
                leaving = sum(other.nbytes for other in self._recent if not other.pins)
                if self.memory.held < self._least or leaving < buffer.nbytes:
                    check_memory_limit(buffer.nbytes)
                self.memory.capacity = self.memory.held
        # Waits without the lock, so others may take the room meanwhile: each try begins anew.
        while (busy := self._begin_pin(buffer)) is not None:
            self._wait(busy)
        # A write under way only reads the memory: readers share it, and a writer waits.
        while buffer.state is ByteState.READING or (for_write and buffer.transfers):
            self._wait(buffer)
            with self._poisoning():
                if buffer.is_over():  # else another thread has begun a read meanwhile
                    self._settle(buffer)
        if whole:
            self.read(buffer, range(len(buffer.pieces)))

    def read(self, buffer: PooledBuffer, pieces: Iterable[int]) -> None:
        """Return when these pieces of a pinned buffer are in memory; no-op if it has none.

        Raises TransferError or DamageError if they cannot be read as they were written.
        """
        wanted = set(pieces) if buffer.pieces else set()
        if wanted and not buffer.pins:
            message = "Pieces were to be read to a buffer that is not pinned."
            raise AssertionError(message)
        while wanted:
            if buffer.state is ByteState.READING:
                self._wait(buffer)
            with self._poisoning():
                if buffer.is_over():  # else another thread has begun a read meanwhile
                    self._settle(buffer)
                    if wanted <= buffer.present:
                        return
                    missing = sorted(wanted - buffer.present)
                    self.bytes_read += _begin_read(self._files, buffer, missing)

    def _begin_pin(self, buffer: PooledBuffer) -> PooledBuffer | None:
        """Pin a buffer and begin its read; if others must leave first, return one that is busy."""
        with self._poisoning():
            if not buffer.is_in_memory:
                busy = self._make_room(buffer.nbytes, at_once=True)
                if busy is not None:
                    return busy
                self._bring(buffer)
            buffer.pins += 1
            # To the end: the order of ``_recent`` is that of use.
            self._recent.pop(buffer)
            self._recent[buffer] = None
        return None

    def can_pin(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more can be pinned, keeping room for the largest of the others.

        That is the largest buffer that is not pinned yet.
        """
        with self._lock:
            pinned = sum(buffer.nbytes for buffer in self._recent if buffer.pins)
            largest = max((b.nbytes for b in self._buffers if not b.pins), default=0)
            return pinned + nbytes + largest <= self.memory.capacity

    def unpin(self, buffer: PooledBuffer, *, dirty: bool) -> None:
        """End a pin; begin writing ``dirty`` bytes when it was the last one.

        A pool that has failed writes nothing: the next pin raises its error.
        """
        with self._lock:
            if self._health.failure is not None:
                buffer.pins -= 1
                return
        if dirty and len(buffer.present) < len(buffer.pieces):
            with self._poisoning():
                raise OptionError(_WROTE_TO_PIECES)
        # Waits for the last write here: ``_settle`` below would wait with the lock held.
        if dirty and buffer.transfers:
            self._wait(buffer)
        with self._poisoning():
            buffer.pins -= 1
            buffer.dirty |= dirty
            if buffer.pins == 0 and buffer.dirty:
                self._settle(buffer)
                buffer.dirty = False
                self.bytes_written += _begin_write(self._files, buffer)
            self._read_expected()

    def put_back(self, buffer: PooledBuffer) -> None:
        """Have the bytes again that ``keep`` has kept; those in memory were changed."""
        self._wait(buffer)
        with self._poisoning():
            self._settle(buffer)
            buffer.is_keeping = buffer.dirty = False
            if buffer.old is not None:
                buffer.spare, buffer.place, buffer.old = buffer.place.stripes, buffer.old, None
            if not buffer.is_in_memory:
                return
            if not buffer.pins:
                self._drop(buffer)
                buffer.drop_pages()
                return
            # It was pinned for a reader, which finds the old bytes.
            if not buffer.is_stored:
                buffer.bytes.zero_()
                return
            self.bytes_read += _begin_read(self._files, buffer, range(len(buffer.pieces)))
        self._wait(buffer)
        with self._poisoning():
            self._settle(buffer)

    def synchronize(self) -> None:
        """Return when nothing is under way; raises what failed."""
        with self._poisoning():
            buffers = list(self._recent)
        for buffer in buffers:
            self._wait(buffer)
            with self._poisoning():
                if buffer.is_over():  # else another thread has begun a transfer meanwhile
                    self._settle(buffer)

    def close(self) -> None:
        """Let files and memory go. Idempotent."""
        self._files.close()
        with self._lock:
            for buffer in list(self._recent):
                self._drop(buffer)
                buffer.drop_pages()

    def _read_expected(self) -> None:
        """Begin reading what is expected, as far as there is room; each of it once."""
        while self._unread:
            buffer = self._unread[0]
            nearer = self._expected[: self._expected.index(buffer)]
            is_known = bool(buffer.upcoming) or not buffer.pieces
            if not buffer.is_in_memory and is_known:
                self._make_room(buffer.nbytes, keep=nearer)
                if not self.memory.fits(buffer.nbytes):
                    return
                # Pages of evicted buffers are moved or freed: they make room below the limit.
                if not self._evicted and not _fits_limit(self._recent, buffer.nbytes):
                    return
                self._bring(buffer)
            del self._unread[0]

    def _bring(self, buffer: PooledBuffer) -> None:
        self._recent[buffer] = None
        self.memory.take(buffer.nbytes)
        # Before the read, which would fill new pages. A buffer that was never written must be
        # zeros, so it takes no other's pages.
        _reuse_pages(self._evicted, buffer if buffer.is_stored else None)
        if not buffer.is_stored:
            buffer.move(ByteState.PRESENT)
            return
        pieces = sorted(buffer.upcoming) if buffer.pieces else []
        self.bytes_read += _begin_read(self._files, buffer, pieces)

    def _settle(self, buffer: PooledBuffer) -> None:
        """Settle transfers that are over; raise their errors, and those of what was read."""
        if buffer.state not in {ByteState.READING, ByteState.WRITING}:
            return
        # End and name are taken first: ``settle`` changes the state, and its check takes time.
        end = time.monotonic() if buffer.seen_over is None else buffer.seen_over
        name = f"weights {_operation(buffer)}"
        buffer.settle(
            partial(_check_read, buffer, self._files.describe(buffer.place.stripes))
            if buffer.state is ByteState.READING
            else None
        )
        if self._log is not None:
            lane = f"{name} ({self._where})"
            self._log.add(LoggedTransfer(lane, name, buffer.begun, end, buffer.moving))

    def _wait(self, buffer: PooledBuffer) -> None:
        """Wait for the transfers of a buffer; called without the lock, so that others go on."""
        since, name = time.monotonic(), f"weights being {_operation(buffer)}"
        is_awaited = bool(buffer.transfers) and buffer.seen_over is None
        with self._health.poisoning():
            buffer.wait()
        # Read once: without the lock another thread may end the log.
        log = self._log
        if log is not None and is_awaited:
            log.add(LoggedTransfer("stall", name, since, time.monotonic()))

    def _make_room(
        self, nbytes: int, *, at_once: bool = False, keep: Sequence[PooledBuffer] = ()
    ) -> PooledBuffer | None:
        """Evict the least recently used buffers until ``nbytes`` more fit.

        ``at_once``: returns the buffer to be waited for first, if one is being read or written.
        Without it those stay, and so do the two used last: in a backward, one is computed with and
        the other will be updated. Expected buffers go after all others, the last one first; those
        in ``keep`` stay.
        """
        oldest = list(self._recent)
        candidates = [b for b in (oldest if at_once else oldest[:-_KEPT]) if b not in keep]
        for buffer in in_order_of_leaving(candidates, self._expected):
            if self.memory.fits(nbytes):
                break
            # What was read ahead was not used yet, also when the read is over.
            is_unused = buffer.state is ByteState.READING and not at_once
            if buffer.pins or is_unused:
                continue
            if not buffer.is_over():
                if at_once:
                    return buffer
                continue
            self._settle(buffer)
            self._drop(buffer)
            self._evicted.append(buffer)
        return None

    def _drop(self, buffer: PooledBuffer) -> None:
        del self._recent[buffer]
        buffer.leave()
        buffer.present.clear()
        self.memory.give(buffer.nbytes)

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Hold the lock; poison the pool on any error, after which weights are unknown."""
        with self._lock:
            self._health.check()
            now = time.monotonic()
            # A transfer without a wait ends, for the log, at the first call that sees it over.
            for buffer in () if self._log is None else self._recent:
                if buffer.transfers and buffer.seen_over is None and buffer.is_over():
                    buffer.seen_over = now
            try:
                with self._health.poisoning():
                    yield
            finally:
                _reuse_pages(self._evicted, None)


def _begin_read(files: StripedFiles, buffer: PooledBuffer, pieces: Sequence[int]) -> int:
    """Begin reading a buffer as a whole; of one with pieces, these. Return the bytes."""
    runs = [run for piece in pieces for run in buffer.pieces[piece]]
    if not buffer.pieces:
        runs = list(buffer.place.runs)
    buffer.begun, buffer.seen_over = time.monotonic(), None
    if buffer.is_in_files:
        reads = [r.file.read(r.offset, buffer.bytes[r.at : r.at + r.nbytes]) for r in runs]
    else:
        reads = files.read(buffer.place.stripes, buffer.bytes)
    nbytes = sum(run.nbytes for run in runs) if buffer.is_in_files else buffer.nbytes
    buffer.moving = nbytes if buffer.pieces else buffer.nbytes
    buffer.fresh = pieces
    buffer.present.update(pieces)
    buffer.begin(ByteState.READING, *reads)
    return nbytes


def _begin_write(files: StripedFiles, buffer: PooledBuffer) -> int:
    """Begin writing a buffer that nobody has pinned, so nobody changes it; return the bytes."""
    stripes, is_kept = buffer.place.stripes, buffer.is_keeping and buffer.old is None
    if is_kept or buffer.is_in_files:
        stripes, buffer.spare = buffer.spare or files.allocate(buffer.nbytes), ()
    if is_kept:
        buffer.old = buffer.place
    if buffer.is_in_files:
        logger.info(
            "%s of weights that were frozen were written to: they are copied from %s to %s",
            *(format_bytes(buffer.nbytes), _source_of(buffer)),
            ", ".join(map(str, files.directories)),
        )
    checksum = _native.checksum_by_blocks(buffer.bytes.data_ptr(), buffer.nbytes)
    buffer.place = StoredBytes(stripes, checksum=checksum)
    buffer.begun, buffer.seen_over = time.monotonic(), None
    buffer.moving = buffer.nbytes
    buffer.begin(ByteState.WRITING, *files.write(stripes, buffer.bytes))
    return buffer.nbytes


def _check_read(buffer: PooledBuffer, place: str) -> None:
    """Raise DamageError unless the bytes that were read are those that were written."""
    for file in {run.file for run in buffer.place.runs}:
        file.validate_unchanged()
    # No checksum was taken of the user's files: only a later write to them can be seen.
    if buffer.is_in_files:
        buffer.decode()
        return
    if _native.checksum_by_blocks(buffer.bytes.data_ptr(), buffer.nbytes) != buffer.place.checksum:
        message = (
            f"read of {buffer.nbytes} bytes {place} gave other weights"
            " than were written there: their checksum does not fit. Look at `dmesg` and the drive's"
            " health; go on from the last commit."
        )
        raise DamageError(message)


def _source_of(buffer: PooledBuffer) -> str:
    runs = buffer.place.runs
    return str(runs[0].file.path.parent) if runs else "codes in memory"


def _operation(buffer: PooledBuffer) -> str:
    return "read" if buffer.state is ByteState.READING else "written"


def _fits_limit(held: Iterable[PooledBuffer], nbytes: int) -> bool:
    """Return whether the limit of memory has room beside what reads under way will fill."""
    if memory_limit() is None:
        return True
    # A copy: ``pin`` asks without the lock, and others may add buffers meanwhile.
    reading = sum(buffer.nbytes for buffer in list(held) if buffer.state is ByteState.READING)
    return fits_memory_limit(nbytes + reading)


def _reuse_pages(evicted: list[PooledBuffer], reader: PooledBuffer | None) -> None:
    """Give a buffer that is about to be read the pages of one of its size; drop all others'."""
    for other in evicted:
        if reader is not None and reader is not other and reader.nbytes == other.nbytes:
            reader.take_pages(other)
            reader = None
        else:
            other.drop_pages()
    evicted.clear()
