"""Shelves: tensors on disk that come to memory and go together.

[Note: A shelf's memory] Each shelf has a range of addresses of its own for ever, and pages only
while somebody needs its bytes: they are read into place, and the pages are given back. So a weight
has one address for the optimizer's kernels, whoever fetched it and whenever.

    absent --fetch--> reading --lease--> present --(nobody has it, others were used later)--> absent
    the last lease of changed bytes ends: writing too; absent only when they are on disk

The memory of all shelves stays within a capacity, unless more than that is leased at once.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, PoisonedError
from tensorstow.io.arena import Arena
from tensorstow.io.engine import open_engine
from tensorstow.io.files import ALIGN, IoFuture, accepts_direct, scratch_file

_KEPT = 2


class Shelf:
    """Tensors that move as one: on disk, and in memory while they are leased."""

    def __init__(self, shelves: "Shelves", nbytes: int, offset: int) -> None:
        """Take ``nbytes`` of the file from ``offset``; hold none of its memory yet."""
        self.nbytes = nbytes
        self.offset = offset
        self.shelves = shelves
        self._arena = Arena(nbytes, in_children=False)
        self.bytes = self._arena.tensor(0, nbytes, torch.uint8)
        self.leases = 0
        self.present = False
        self.changed = False
        self.reading: IoFuture | None = None
        self.writing: IoFuture | None = None
        self.checksum: int | None = None
        """Of what is on disk; None: nothing was ever written."""

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over the bytes from ``at``, to be used while leased alone.

        Each has a version counter of its own.
        """
        return self._arena.tensor(at, torch.Size(shape).numel(), dtype).view(shape)

    def fetch(self) -> None:
        """Begin reading, where there is room without taking it from anybody."""
        self.shelves.fetch(self)

    def is_ready(self) -> bool:
        """Return whether a lease would wait for nothing."""
        return self.shelves.is_ready(self)

    def lease(self, *, to_change: bool = False) -> None:
        """Return when the bytes are in memory; they stay until ``release``.

        Raises TransferError or DamageError where they cannot be read as they were written.
        """
        self.shelves.lease(self, to_change=to_change)

    def fits(self, nbytes: int) -> bool:
        """Return whether so much more may be leased, with room for any one shelf besides."""
        return self.shelves.fits(nbytes)

    def release(self, *, changed: bool = False) -> None:
        """End a lease; ``changed``: the bytes are to be written back."""
        self.shelves.release(self, changed=changed)

    def drop_pages(self) -> None:
        """Give the memory back."""
        self._arena.drop()


class Shelves:
    """Shelves in one file, and a bound on their memory."""

    def __init__(self, directory: Path, nbytes: int, capacity: int) -> None:
        """Make a file of ``nbytes`` without a name; hold up to ``capacity`` bytes in memory.

        Raises DirectoryError where the directory has no room.
        """
        self.directory = directory
        backend = None if accepts_direct(directory) else "threads"
        self._file = scratch_file(open_engine(backend), directory, nbytes)
        weakref.finalize(self, self._file.close)
        self._capacity = capacity
        self._end = self._largest = 0
        self._recent: dict[Shelf, None] = {}
        self._lock = threading.RLock()
        self._failure: BaseException | None = None
        self.held_bytes = 0
        self.high_water_bytes = 0
        self.bytes_read = 0
        self.bytes_written = 0

    def add(self, nbytes: int) -> Shelf:
        """Return a shelf of zeros, of ``nbytes`` rounded up."""
        shelf = Shelf(self, -(-nbytes // ALIGN) * ALIGN, self._end)
        self._end += shelf.nbytes
        self._largest = max(self._largest, shelf.nbytes)
        return shelf

    def fetch(self, shelf: Shelf) -> None:
        """Begin reading ``shelf``, unless memory would have to be waited for."""
        with self._poisoning():
            if not shelf.present and self._make_room(shelf.nbytes, wait=False):
                self._bring(shelf)

    def is_ready(self, shelf: Shelf) -> bool:
        """Return whether ``shelf`` is in memory, and read."""
        with self._lock:
            return shelf.present and (shelf.reading is None or shelf.reading.done())

    def lease(self, shelf: Shelf, *, to_change: bool) -> None:
        """Return when the bytes of ``shelf`` are in memory and will stay."""
        with self._poisoning():
            if not shelf.present:
                self._make_room(shelf.nbytes, wait=True)
                self._bring(shelf)
            shelf.leases += 1
            self._touch(shelf)
            self._end_read(shelf)
            if to_change:
                self._end_write(shelf)

    def fits(self, nbytes: int) -> bool:
        """Return whether so much more may be leased, with room for any one shelf besides."""
        with self._lock:
            leased = sum(shelf.nbytes for shelf in self._recent if shelf.leases)
            return leased + nbytes + self._largest <= self._capacity

    def release(self, shelf: Shelf, *, changed: bool) -> None:
        """End a lease; begin writing ``changed`` bytes when nobody has one any more."""
        with self._poisoning():
            shelf.leases -= 1
            shelf.changed |= changed
            if shelf.leases == 0 and shelf.changed:
                self._end_write(shelf)
                shelf.changed = False
                shelf.checksum = _native.checksum(shelf.bytes.data_ptr(), shelf.nbytes)
                shelf.writing = self._file.write(shelf.bytes, shelf.offset)
                self.bytes_written += shelf.nbytes

    def settle(self) -> None:
        """Return when nothing is under way; raises what failed."""
        with self._poisoning():
            for shelf in self._recent:
                self._end_read(shelf)
                self._end_write(shelf)

    def close(self) -> None:
        """Let file and memory go. Idempotent."""
        with self._lock:
            self._file.close()
            for shelf in list(self._recent):
                self._drop(shelf)

    def _bring(self, shelf: Shelf) -> None:
        shelf.present = True
        self._touch(shelf)
        self.held_bytes += shelf.nbytes
        self.high_water_bytes = max(self.high_water_bytes, self.held_bytes)
        if shelf.checksum is not None:
            shelf.reading = self._file.read(shelf.bytes, shelf.offset)
            self.bytes_read += shelf.nbytes

    def _touch(self, shelf: Shelf) -> None:
        self._recent.pop(shelf, None)
        self._recent[shelf] = None

    def _end_read(self, shelf: Shelf) -> None:
        if shelf.reading is None:
            return
        reading, shelf.reading = shelf.reading, None
        reading.wait()
        if _native.checksum(shelf.bytes.data_ptr(), shelf.nbytes) != shelf.checksum:
            message = (
                f"read of {shelf.nbytes} bytes at offset {shelf.offset} of {self._file.path} gave"
                " other weights than were written there: their checksum does not fit. Look at"
                " `dmesg` and the drive's health; go on from the last commit."
            )
            raise DamageError(message)

    @staticmethod
    def _end_write(shelf: Shelf) -> None:
        if shelf.writing is not None:
            writing, shelf.writing = shelf.writing, None
            writing.wait()

    def _make_room(self, nbytes: int, *, wait: bool) -> bool:
        """Drop what was not used for longest, until ``nbytes`` more fit; return whether they do.

        What is still being written is waited for, or without ``wait`` passed over, as are the two
        used last: in a backward, one is computed with and the other will be updated.
        """
        oldest = list(self._recent)
        for shelf in oldest if wait else oldest[:-_KEPT]:
            if self.held_bytes + nbytes <= self._capacity:
                break
            busy = shelf.reading or (shelf.writing is not None and not shelf.writing.done())
            if shelf.leases or (busy and not wait):
                continue
            self._end_read(shelf)
            self._end_write(shelf)
            self._drop(shelf)
        return self.held_bytes + nbytes <= self._capacity

    def _drop(self, shelf: Shelf) -> None:
        del self._recent[shelf]
        shelf.present = False
        self.held_bytes -= shelf.nbytes
        shelf.drop_pages()

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Hold the lock; whatever fails leaves weights unknown, and nobody may go on from there."""
        with self._lock:
            if self._failure is not None:
                message = (
                    f"Weights on disk failed before: {self._failure} Make the model anew and"
                    " resume() the last commit."
                )
                raise PoisonedError(message) from self._failure
            try:
                yield
            except BaseException as error:
                self._failure = error
                raise
