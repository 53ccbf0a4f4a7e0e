"""The order in which things are used: what comes next, and what may leave memory first.

[Note: Prefetch order] Units are used in one order in forward and in the reverse order in backward.
The previous unit shows which of the two runs, so pairs of units predict the next one. After a wrong
prediction a unit is read when it is used.
"""

from collections.abc import Iterable, Iterator
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")


class UseOrder(Generic[T]):
    """Predicts what is used next from the last two that were used ([Note: Prefetch order])."""

    def __init__(self) -> None:
        """Begin with no recorded order."""
        self.last: tuple[T | None, T | None] = (None, None)
        """The last two uses, the last one second."""
        self._next: dict[tuple[T | None, T | None], T] = {}

    def record(self, used: T) -> None:
        """Record that ``used`` followed the last two."""
        self._next[self.last] = used
        self.last = (self.last[1], used)

    def following(self) -> Iterator[T]:
        """Yield the predicted uses in order, until there is no prediction."""
        pair = self.last
        while (expected := self._next.get(pair)) is not None:
            yield expected
            pair = (pair[1], expected)


def in_order_of_leaving(candidates: Iterable[T], upcoming: Iterable[T]) -> list[T]:
    """Return first the candidates without a next use, as they come; then the farthest use first.

    ``upcoming`` are the next uses, the nearest first; their number is finite.
    """
    ranks: dict[T, int] = {}
    for rank, used in enumerate(upcoming):
        ranks.setdefault(used, rank)
    return sorted(candidates, key=lambda candidate: -ranks.get(candidate, inf))
