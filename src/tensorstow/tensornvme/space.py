"""Room on disk: extents of scratch files that grow as they are needed."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from tensorstow.io.files import ALIGN, File

_GROWTH = 16 << 20
_LEAST_STRIPE = 1 << 20  # smaller pieces on more disks are slower, not faster


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one piece of a tensor lies: its bytes ``start`` to ``stop`` from ``offset`` on."""

    file: int
    """Index of the file."""
    offset: int
    start: int
    stop: int


class FreeRuns:
    """The free byte ranges of one file: sorted, neighbours merged, the first that fits is taken."""

    def __init__(self) -> None:
        """Begin with an empty file."""
        self._runs: list[tuple[int, int]] = []
        self.end = 0
        """Everything from here on is free, and not part of the file yet."""

    def find(self, nbytes: int) -> int:
        """Return the offset at which ``nbytes`` would be put."""
        for start, stop in self._runs:
            if stop - start >= nbytes:
                return start
        # The last run may touch the end: then it and what is behind it are one.
        if self._runs and self._runs[-1][1] == self.end:
            return self._runs[-1][0]
        return self.end

    def take(self, offset: int, nbytes: int) -> None:
        """Take what ``find`` has just found."""
        stop = offset + nbytes
        index = bisect(self._runs, (offset, stop))
        if index and self._runs[index - 1][0] == offset:
            index -= 1  # a run that is shorter than what is taken: it touches the end
        if index < len(self._runs) and self._runs[index][0] == offset:
            _, run_stop = self._runs.pop(index)
            if stop < run_stop:
                self._runs.insert(index, (stop, run_stop))
        self.end = max(self.end, stop)

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range that was taken."""
        start, stop = offset, offset + nbytes
        index = bisect(self._runs, (start, stop))
        if index < len(self._runs) and self._runs[index][0] == stop:
            stop = self._runs.pop(index)[1]
        if index and self._runs[index - 1][1] == start:
            index -= 1
            start = self._runs.pop(index)[0]
        self._runs.insert(index, (start, stop))


class ScratchSpace:
    """Scratch files over which tensors are striped."""

    def __init__(self, files: Sequence[File]) -> None:
        """Take over ``files``, one per directory."""
        self.files = tuple(files)
        self._free = [FreeRuns() for _ in files]
        self._turn = 0

    def take(self, nbytes: int) -> tuple[Extent, ...]:
        """Reserve room for ``nbytes``; raise DirectoryError where a disk has too little."""
        count = max(1, min(len(self.files), nbytes // _LEAST_STRIPE))
        width = _round_up(-(-nbytes // count), ALIGN)
        cuts = range(0, nbytes, max(width, 1))
        taken: list[Extent] = []
        try:
            taken.extend(self._take(start, min(start + width, nbytes)) for start in cuts)
        except BaseException:
            self.give(taken)
            raise
        return tuple(taken)

    def give(self, extents: Sequence[Extent]) -> None:
        """Free what ``take`` returned."""
        for extent in extents:
            nbytes = _round_up(extent.stop - extent.start, ALIGN)
            self._free[extent.file].give(extent.offset, nbytes)

    def close(self) -> None:
        """Wait for what is in flight and drop the files. Idempotent."""
        for file in self.files:
            file.close()

    def _take(self, start: int, stop: int) -> Extent:
        turn, free = self._turn, self._free[self._turn]
        nbytes = _round_up(stop - start, ALIGN)
        offset = free.find(nbytes)
        if offset + nbytes > free.end:
            self.files[turn].reserve(_round_up(offset + nbytes, _GROWTH))
        free.take(offset, nbytes)
        self._turn = (turn + 1) % len(self.files)
        return Extent(turn, offset, start, stop)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
