"""The serial reference of a buffer pool: one call at a time, without files, threads or waiting."""

from collections.abc import Sequence
from math import inf


class SerialPool:
    """What is in memory, and what was read and written, of buffers that hold one number each."""

    def __init__(self, sizes: Sequence[int], capacity: int, least: int) -> None:
        self.sizes, self.capacity, self._least = sizes, capacity, least
        self.numbers = [0] * len(sizes)
        self.pins = [0] * len(sizes)
        self.recent: list[int] = []
        """Buffers in memory, the least recently used first."""
        self.unused: set[int] = set()
        """Buffers that were read ahead and not pinned yet."""
        self.bytes_read = self.bytes_written = 0
        self._is_stored = [False] * len(sizes)
        self._is_dirty = [False] * len(sizes)
        self._expected: list[int] = []
        self._unread: list[int] = []
        self._kept: dict[int, tuple[int, bool]] = {}

    @property
    def held(self) -> int:
        return sum(self.sizes[buffer] for buffer in self.recent)

    def pin(self, buffer: int) -> None:
        if buffer not in self.recent:
            self._make_room(self.sizes[buffer], self.recent, at_once=True)
            self._bring(buffer)
            others = [other for other in self.recent if not self.pins[other]]
            assert self.held <= self.capacity or others == [buffer]
        self.pins[buffer] += 1
        self.recent.remove(buffer)
        self.recent.append(buffer)
        self.unused.discard(buffer)

    def unpin(self, buffer: int, number: int | None = None) -> None:
        self.pins[buffer] -= 1
        if number is not None:
            self.numbers[buffer], self._is_dirty[buffer] = number, True
        if self._is_dirty[buffer] and not self.pins[buffer]:
            self.bytes_written += self.sizes[buffer]
            self._is_stored[buffer], self._is_dirty[buffer] = True, False
        self._read_expected()

    def keep(self, buffer: int) -> None:
        self._kept[buffer] = self.numbers[buffer], self._is_stored[buffer]

    def confirm(self, buffer: int) -> None:
        self._kept.pop(buffer, None)

    def put_back(self, buffer: int) -> None:
        kept = self._kept.pop(buffer, (self.numbers[buffer], self._is_stored[buffer]))
        self.numbers[buffer], self._is_stored[buffer] = kept
        if buffer not in self.recent:
            return
        self.unused.discard(buffer)
        if not self.pins[buffer]:
            self.recent.remove(buffer)
        elif self._is_stored[buffer]:
            self.bytes_read += self.sizes[buffer]

    def expect(self, buffers: Sequence[int]) -> None:
        self._expected, self._unread = list(buffers), list(buffers)
        self._read_expected()

    def resize(self, capacity: int) -> None:
        self.capacity = max(min(capacity, sum(self.sizes)), self._least)
        self._make_room(0, self.recent[:-2])

    def _read_expected(self) -> None:
        while self._unread:
            buffer = self._unread[0]
            nearer = self._expected[: self._expected.index(buffer)]
            if buffer not in self.recent:
                leaving = [other for other in self.recent[:-2] if other not in nearer]
                self._make_room(self.sizes[buffer], leaving)
                if self.held + self.sizes[buffer] > self.capacity:
                    return
                self._bring(buffer)
            del self._unread[0]

    def _bring(self, buffer: int) -> None:
        self.recent.append(buffer)
        if self._is_stored[buffer]:
            self.bytes_read += self.sizes[buffer]
            self.unused.add(buffer)

    def _make_room(self, nbytes: int, buffers: Sequence[int], *, at_once: bool = False) -> None:
        for buffer in sorted(buffers, key=self._next_use, reverse=True):
            if self.held + nbytes <= self.capacity:
                return
            if not self.pins[buffer] and (at_once or buffer not in self.unused):
                self.recent.remove(buffer)
                self.unused.discard(buffer)

    def _next_use(self, buffer: int) -> float:
        return self._expected.index(buffer) if buffer in self._expected else inf
