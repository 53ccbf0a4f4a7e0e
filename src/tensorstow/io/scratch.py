"""Scratch files: files without a name, freed when the process ends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import tensorstow._native as _native
from tensorstow.base.sizes import round_up
from tensorstow.io.files import ALIGN, GROWTH_BYTES, File, IoFuture, grow, scratch_file
from tensorstow.io.free_list import FreeList


@dataclass(frozen=True, slots=True)
class ScratchExtent:
    """A byte range of a scratch file."""

    file: int
    """The index of the file."""
    offset: int
    nbytes: int


class ScratchFiles:
    """Scratch files, one per directory; extents go round them, and free bytes are used again.

    A file grows where none of its free ranges is large enough for an extent.
    """

    def __init__(
        self, engine: _native.Engine, directories: Sequence[Path], sizes: Sequence[int]
    ) -> None:
        """Create a file in each of ``directories`` and reserve its bytes in ``sizes``.

        Raises DirectoryError if a directory is missing, read-only, in RAM or too full.
        """
        self.engine = engine
        self.files: list[File] = []
        self._free = [FreeList() for _ in directories]
        self._sizes = list(sizes)
        self._next = 0
        try:
            for directory, size in zip(directories, sizes, strict=True):
                self.files.append(scratch_file(engine, directory, size))
        except BaseException:
            self.close()
            raise
        for free, size in zip(self._free, sizes, strict=True):
            if size:
                free.add(0, size)

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
        file, padded = self._next, round_up(nbytes, ALIGN)
        while (offset := self._free[file].allocate(padded)) is None:
            self._grow(file, padded)
        self._next = (file + 1) % len(self.files)
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
