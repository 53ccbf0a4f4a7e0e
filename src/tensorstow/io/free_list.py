"""The free byte ranges of a file: arithmetic only."""

import bisect


class FreeList:
    """Free byte ranges in order of their offsets; neighbours are merged into one range.

    ``take`` is first fit: the range with the lowest offset that is large enough.
    """

    def __init__(self) -> None:
        """Begin with nothing free."""
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def nbytes(self) -> int:
        """All free bytes."""
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        """Make the bytes from ``start`` up to ``end`` free; none of them may be free already."""
        at = bisect.bisect_left(self._starts, start)
        if at and self._ends[at - 1] == start:
            at -= 1
            start = self._starts[at]
            del self._starts[at], self._ends[at]
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends[at]
            del self._starts[at], self._ends[at]
        self._starts.insert(at, start)
        self._ends.insert(at, end)

    def allocate(self, nbytes: int) -> int | None:
        """Allocate ``nbytes`` and return their offset; None if no range is large enough."""
        for at, start in enumerate(self._starts):
            if self._ends[at] - start >= nbytes:
                self._starts[at] += nbytes
                if self._starts[at] == self._ends[at]:
                    del self._starts[at], self._ends[at]
                return start
        return None

    def trailing(self, end: int) -> int:
        """Return how many bytes right before offset ``end`` are free."""
        return end - self._starts[-1] if self._ends and self._ends[-1] == end else 0
