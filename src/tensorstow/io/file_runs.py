"""Bytes of files that are only read: which are read at once, and where they lie in a buffer."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch

from tensorstow.base.sizes import round_up
from tensorstow.io.arena import TENSOR_ALIGN
from tensorstow.io.files import ALIGN, IoFuture
from tensorstow.io.safetensors import Entry


class SourceFile(Protocol):
    """A file that is open for reads, and is not to change meanwhile."""

    path: Path

    def read(self, offset: int, into: torch.Tensor) -> IoFuture:
        """Start filling ``into``, bytes in host memory, from byte ``offset``."""

    def validate_unchanged(self) -> None:
        """Raise DamageError if somebody has written to the file since it was opened."""


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Bytes that are read at once."""

    file: SourceFile
    offset: int
    """Where they begin in the file."""
    at: int
    """Where they begin in the buffer."""
    nbytes: int


class BufferLayout:
    """Places for tensors in a buffer, one after the other."""

    def __init__(self) -> None:
        """Begin with an empty buffer."""
        self.nbytes = 0

    def place(self, entry: Entry, dtype: torch.dtype) -> tuple[int, int | None]:
        """Return where a tensor's bytes begin, and its values in ``dtype`` if it is another one."""
        if entry.offset % TENSOR_ALIGN == 0 and entry.dtype == dtype:
            # At the same place of a page as in the file: direct I/O needs no copy.
            at = self.nbytes + (entry.offset - self.nbytes) % ALIGN
            self.nbytes = at + entry.nbytes
        else:
            at = self.append(entry.nbytes)
        if entry.dtype == dtype:
            return at, None
        return at, self.append(entry.nbytes // entry.dtype.itemsize * dtype.itemsize)

    def append(self, nbytes: int) -> int:
        """Return where the next ``nbytes`` begin."""
        at = round_up(self.nbytes, TENSOR_ALIGN)
        self.nbytes = at + nbytes
        return at


def runs_of(tensors: Iterable[tuple[SourceFile, Entry, int]]) -> list[Run]:
    """Return what is read for tensors: those that follow each other in file and buffer at once.

    ``tensors`` are in the order of the buffer, each with its place there.
    """
    runs: list[Run] = []
    for file, entry, at in tensors:
        offset, nbytes = entry.offset, entry.nbytes
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.file is file
            and (last.offset + last.nbytes, last.at + last.nbytes) == (offset, at)
        ):
            runs[-1] = Run(file, last.offset, last.at, last.nbytes + nbytes)
        elif nbytes:
            runs.append(Run(file, offset, at, nbytes))
    return runs


def cut_runs(runs: Sequence[Run], begin: int, end: int) -> Iterator[Run]:
    """Yield the reads of the bytes from ``begin`` to ``end`` of a buffer that ``runs`` fill.

    ``runs`` are in the order of the buffer.
    """
    # The last run that begins at or before ``begin`` may reach past it.
    first = max(0, bisect_right(runs, begin, key=lambda run: run.at) - 1)
    for run in islice(runs, first, None):
        if run.at >= end:
            return
        start, stop = max(begin, run.at), min(end, run.at + run.nbytes)
        if start < stop:
            yield Run(run.file, run.offset + start - run.at, start, stop - start)
