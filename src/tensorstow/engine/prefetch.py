"""Which shelf comes next: what followed the last two the time before.

[Note: Trace] Units come in one order in forward and in the other in backward. Which of the two runs
is seen by the unit before, so pairs of units predict the next one; a model that takes other ways is
fetched when it asks.
"""

from tensorstow.io.shelves import Shelf


class Prefetcher:
    """Fetches shelves ahead of their use."""

    def __init__(self, ahead: int) -> None:
        """Fetch ``ahead`` shelves beyond the one that is used."""
        self._ahead = ahead
        self._last: tuple[Shelf | None, Shelf | None] = (None, None)
        self._next: dict[tuple[Shelf | None, Shelf | None], Shelf] = {}

    def used(self, shelf: Shelf) -> None:
        """Learn that ``shelf`` is used now, and begin fetching those that will be."""
        before, last = self._last
        if shelf is last:
            return
        self._next[before, last] = shelf
        self._last = pair = (last, shelf)
        for _ in range(self._ahead):
            following = self._next.get(pair)
            if following is None:
                return
            following.fetch()
            pair = (pair[1], following)
