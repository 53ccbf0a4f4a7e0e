"""Shelves that are read: the one that is copied from, and which comes next.

[Note: Open] Where FSDP2 copies what it gathers, it does so one unit after the other, and it has
copied a unit's bytes when it asks for another one's. So one shelf is leased for that at a time,
also where FSDP2 gathers a unit ahead that is then not used, and says nothing of it.

[Note: Trace] Units come in one order in forward and in the other in backward. Which of the two runs
is seen by the unit before, so pairs of units predict the next one; a model that takes other ways is
fetched when it asks.
"""

from tensorstow.io.buffer_pool import Shelf


class Prefetcher:
    """Leases the shelf that is copied from, and fetches those that will be read."""

    def __init__(self, ahead: int) -> None:
        """Fetch ``ahead`` shelves beyond the one that is used."""
        self._ahead = ahead
        self._open: Shelf | None = None
        self._last: tuple[Shelf | None, Shelf | None] = (None, None)
        self._next: dict[tuple[Shelf | None, Shelf | None], Shelf] = {}

    def open(self, shelf: Shelf) -> None:
        """Return when the bytes of ``shelf`` are in memory; they stay until it is closed.

        Closes the one before: it was copied.
        """
        if shelf is not self._open:
            self._close()
            shelf.lease()
            self._open = shelf
        self.used(shelf)

    def close(self, shelf: Shelf) -> None:
        """Say that ``shelf`` was copied. Idempotent."""
        if shelf is self._open:
            self._close()

    def _close(self) -> None:
        last, self._open = self._open, None
        if last is not None:
            last.release()

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
