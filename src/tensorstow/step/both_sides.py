"""Runs a step to its end on host and device at once.

[Note: Both at once] Some chunks of a step may be updated by the host (``DeviceFeed``), others by
the device (``DeviceUpdater``). Both sides share the ring of the pipeline, and either may be the
next that can go on. So neither is waited for alone while both have work left: threads wait for the
oldest copy of each side, and every copy that ends and every chunk that the pipeline finishes or
offers changes one count. The stepping thread reads the count, starts all work that can start, and
sleeps until the count differs from what it read; so no change is missed. No deadlock is possible: a
slot of the ring that one side waits for is held by a copy under way, which ends by itself, or by a
chunk that the pipeline finishes or offers without anybody's help.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tensorstow.io.device_link import DeviceEvent
from tensorstow.states.native_pipeline import CallerChunks


class Side:
    """What can go on by itself in a step; this class's is over when it begins."""

    def move_on(self) -> None:
        """Start all work that can start without waiting."""

    @property
    def is_over(self) -> bool:
        """Return whether the closed step needs no more calls of ``move_on``."""
        return True

    @property
    def oldest_copy(self) -> DeviceEvent | None:
        """Return the event of the oldest copy that ``move_on`` waits for, if any."""
        return None

    def wait_for_one(self) -> None:
        """Return when one thing more can be done; the step is closed, and not over."""


def run_to_end(
    sides: Sequence[Side], changes: CallerChunks, close: Callable[[], None]
) -> dict[Side, float]:
    """Return when all sides are over; return the seconds that each took.

    ``close`` begins the rest of the step, of which ``changes`` counts what the pipeline does.
    """
    begin = time.monotonic()
    close()
    seconds: dict[Side, float] = {}
    with ThreadPoolExecutor(len(sides)) as threads:
        either = _EitherWait(changes, threads)
        while True:
            seen = changes.changes()
            for side in sides:
                side.move_on()
                if side.is_over:
                    seconds.setdefault(side, time.monotonic() - begin)
            busy = [side for side in sides if side not in seconds]
            if not busy:
                return seconds
            if len(busy) == 1:
                busy[0].wait_for_one()
            else:
                either.wait(busy, seen)


class _EitherWait:
    """Waits until any of several sides can go on ([Note: Both at once])."""

    def __init__(self, changes: CallerChunks, threads: ThreadPoolExecutor) -> None:
        """Wait for copies in ``threads``: one for each side, at least."""
        self._changes = changes
        self._threads = threads
        self._watched: dict[Side, tuple[DeviceEvent, Future[None]]] = {}

    def wait(self, sides: Sequence[Side], seen: int) -> None:
        """Block until the pipeline's changes are not ``seen``: a copy's end is one of them."""
        for side in sides:
            copy = side.oldest_copy
            if copy is not None and (
                side not in self._watched or self._watched[side][0] is not copy
            ):
                self._watched[side] = copy, self._threads.submit(self._signal_after, copy)
        self._changes.wait_change(seen)
        for _, ended in self._watched.values():
            if ended.done():
                ended.result()  # raises the device's error

    def _signal_after(self, copied: DeviceEvent) -> None:
        try:
            copied.synchronize()
        finally:
            self._changes.signal()
