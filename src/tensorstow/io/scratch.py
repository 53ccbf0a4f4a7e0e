"""Scratch files: files without a name, freed when the process ends."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import tensorstow._native as _native
from tensorstow.base.profile import drive_shares
from tensorstow.base.sizes import round_up
from tensorstow.io.engine import open_engine
from tensorstow.io.files import (
    ALIGN,
    GROWTH_BYTES,
    File,
    IoFuture,
    backend_for,
    grow,
    scratch_file,
)
from tensorstow.io.free_list import FreeList


@dataclass(frozen=True, slots=True)
class FileStripe:
    """A part of a buffer, and where it is in one of several files."""

    file: int
    offset: int
    begin: int
    end: int


class StripedFiles:
    """Scratch files, one per directory; each buffer has a part in each of them.

    So one read of a buffer takes the time that the drives need together. Each file has an engine
    of its own, so that a drive which is late leaves the others' queues alone.
    """

    def __init__(self, directories: Sequence[Path], nbytes: int) -> None:
        """Create the files, and reserve ``nbytes`` in all, in shares by the drives' rates.

        Raises DirectoryError if a directory is missing, read-only, in RAM or too full.
        """
        self._shares = drive_shares(directories)
        self._reserved = [round_up(math.ceil(nbytes * share), ALIGN) for share in self._shares]
        self._ends = [0] * len(self._shares)
        self._files: list[File] = []
        try:
            for directory, size in zip(directories, self._reserved, strict=True):
                engine = open_engine(backend_for([directory]))
                self._files.append(scratch_file(engine, directory, size))
        except BaseException:
            self.close()
            raise

    @property
    def directories(self) -> list[Path]:
        """The directories of the files."""
        return [file.path.parent for file in self._files]

    def allocate(self, nbytes: int) -> list[FileStripe]:
        """Return the parts of a new buffer, which has a multiple of ALIGN bytes.

        Raises DirectoryError if a disk is full.
        """
        # Files are due their shares of all bytes so far: errors of rounding do not add up.
        total, begin, last = sum(self._ends) + nbytes, 0, len(self._shares) - 1
        stripes = []
        for file, share in enumerate(self._shares):
            missing = nbytes - begin
            # The last file takes the rest; a file that is ahead of its share gets nothing.
            due = missing if file == last else share * total - self._ends[file]
            end = begin + min(max(round(due / ALIGN), 0) * ALIGN, missing)
            if end > begin:
                stripes.append(FileStripe(file, self._ends[file], begin, end))
            begin = end
        for stripe in stripes:
            needed = stripe.offset + stripe.end - stripe.begin
            if needed > self._reserved[stripe.file]:
                self._files[stripe.file].reserve(needed)
                self._reserved[stripe.file] = needed
            self._ends[stripe.file] = needed
        return stripes

    def read(self, stripes: Iterable[FileStripe], memory: torch.Tensor) -> list[IoFuture]:
        """Start filling the bytes of a buffer."""
        return [self._files[s.file].read(memory[s.begin : s.end], s.offset) for s in stripes]

    def write(self, stripes: Iterable[FileStripe], memory: torch.Tensor) -> list[IoFuture]:
        """Start writing the bytes of a buffer."""
        return [self._files[s.file].write(memory[s.begin : s.end], s.offset) for s in stripes]

    def describe(self, stripes: Iterable[FileStripe]) -> str:
        """Return where a buffer is, for messages."""
        return " and ".join(f"at offset {s.offset} of {self._files[s.file].path}" for s in stripes)

    def close(self) -> None:
        """Wait for transfers in flight, then close the files. Idempotent."""
        for file in self._files:
            file.close()


@dataclass(frozen=True, slots=True)
class ScratchExtent:
    """A byte range of a scratch file."""

    file: int
    """The index of the file."""
    offset: int
    nbytes: int


class FileTurns:
    """Chooses a file for each extent, so that each file gets its share of all bytes."""

    def __init__(self, shares: Sequence[float]) -> None:
        """Begin with ``shares``, which are above 0."""
        self._shares = list(shares)
        self._given = [0] * len(self._shares)

    def next(self, nbytes: int) -> int:
        """Return the file of the next extent: the one that lacks most of its share."""
        loads = [(n + nbytes) / share for n, share in zip(self._given, self._shares, strict=True)]
        file = loads.index(min(loads))
        self._given[file] += nbytes
        return file


class ScratchFiles:
    """Scratch files, one per directory, among which extents are shared; free bytes are reused.

    A file grows where none of its free ranges is large enough for an extent.
    """

    def __init__(
        self,
        engines: Sequence[_native.Engine],
        directories: Sequence[Path],
        sizes: Sequence[int],
        shares: Sequence[float] | None = None,
    ) -> None:
        """Create a file in each of ``directories`` and reserve its bytes in ``sizes``.

        ``engines``: of each file; files with one engine have one queue, in which those of a quick
        drive wait for those of a slow one. ``shares``: of all extents' bytes, by file; None: equal
        ones.

        Raises DirectoryError if a directory is missing, read-only, in RAM or too full.
        """
        self.files: list[File] = []
        self._free = [FreeList() for _ in directories]
        self._sizes = list(sizes)
        self._turns = FileTurns(shares or [1.0] * len(directories))
        try:
            for engine, directory, size in zip(engines, directories, sizes, strict=True):
                self.files.append(scratch_file(engine, directory, size))
        except BaseException:
            self.close()
            raise
        for free, size in zip(self._free, sizes, strict=True):
            if size:
                free.add(0, size)

    @property
    def engine(self) -> _native.Engine:
        """The I/O engine of the first file. Tests put faults in here."""
        return self.files[0].engine

    @property
    def nbytes(self) -> int:
        """The bytes of all files, used and free."""
        return sum(self._sizes)

    @property
    def used_bytes(self) -> int:
        """The bytes of extents that were not released."""
        return self.nbytes - sum(free.nbytes for free in self._free)

    def allocate(self, nbytes: int) -> ScratchExtent:
        """Return an extent of ``nbytes`` (above 0) in the next file, at a multiple of ALIGN.

        Raises DirectoryError if its disk is full.
        """
        padded = round_up(nbytes, ALIGN)
        file = self._turns.next(padded)
        while (offset := self._free[file].allocate(padded)) is None:
            self._grow(file, padded)
        return ScratchExtent(file, offset, nbytes)

    def release(self, extents: Iterable[ScratchExtent]) -> None:
        """Make the bytes of ``extents`` free."""
        for extent in extents:
            end = extent.offset + round_up(extent.nbytes, ALIGN)
            self._free[extent.file].add(extent.offset, end)

    def read(self, extent: ScratchExtent, memory: torch.Tensor) -> IoFuture:
        """Start filling ``memory`` from the beginning of ``extent``."""
        return self.files[extent.file].read(memory, extent.offset)

    def write(self, extent: ScratchExtent, memory: torch.Tensor) -> IoFuture:
        """Start writing ``memory`` to the beginning of ``extent``."""
        return self.files[extent.file].write(memory, extent.offset)

    def close(self) -> None:
        """Wait for transfers in flight, then close the files. Idempotent."""
        for file in self.files:
            file.close()

    def _grow(self, file: int, nbytes: int) -> None:
        """Make the last free range of ``file`` one of at least ``nbytes``."""
        size = self._sizes[file]
        missing = nbytes - self._free[file].trailing(size)
        wanted = grow(self.files[file], size, missing, GROWTH_BYTES)
        self._free[file].add(size, wanted)
        self._sizes[file] = wanted
