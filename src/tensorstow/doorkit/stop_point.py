"""Ends a run at a signal, in loops of other projects: between two steps, and on all ranks at once.

A loop that commits to a directory of ours ends by ``stop_signals=`` of its optimizer. Here a run
has checkpoints of its project, which must be saved for it to go on.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.base.signals import StopHandlers, StopSignals, read_stop_signals
from tensorstow.fsdp.sharding import host_group


class StopPoint:
    """The point between two steps at which a run saves and ends, if a signal came to any rank.

    Args:
        stop_signals: The name of a signal, or a dict of exit statuses by names, as in ``AdamW``.
            Default: None, no signals are handled, and no run ends.
        on_stop: Called on every rank before the run ends; saves a checkpoint. Default: None, the
            caller saves between ``is_last`` and ``end``.

    Raises:
        OptionError: It is no signal, or this is not the main thread.
    """

    def __init__(
        self, stop_signals: StopSignals = None, on_stop: Callable[[], object] | None = None
    ) -> None:
        self.requested = False
        """Set by the handlers, which do what was done before once this object is gone."""
        statuses = {} if stop_signals is None else read_stop_signals(stop_signals)
        self._handlers = StopHandlers(statuses, self)
        self._ends_runs = bool(statuses)
        self._on_stop = on_stop
        self._has_stepped = False

    def note_step(self) -> None:
        """Note that a step was taken: the run is between two steps until ``is_last``."""
        self._has_stepped = self._ends_runs

    def is_last(self) -> bool:
        """Return whether the run ends between these two steps; collective after a step."""
        if not self._has_stepped:
            return False
        self._has_stepped = False
        self._handlers.ends_with = _largest(self._handlers.status)
        return self._handlers.ends_with is not None

    def end(self) -> None:
        """Raise SystemExit with the status of the signal, after ``is_last`` and a save; collective.

        Without it, as after a save that failed, the next point is the last one.
        """
        if self._handlers.ends_with is not None:
            _largest(None)  # a launcher may kill the others once the first one has ended
        self._handlers.end()

    def reach(self) -> None:
        """Save and raise SystemExit if the run ends between these two steps; collective."""
        if self.is_last():
            if self._on_stop is not None:
                self._on_stop()
            self.end()

    def close(self) -> None:
        """Restore the handlers that were there before. Idempotent."""
        self._handlers.close()


def stop_point(stop_signals: StopSignals, on_stop: Callable[[], object] | None) -> StopPoint:
    """Return the stop point of two keywords.

    Raises OptionError if one was given without the other, and as ``StopPoint``.
    """
    is_given = stop_signals is not None or on_stop is not None
    if is_given and (stop_signals is None or not callable(on_stop)):
        message = (
            f"stop_signals={stop_signals!r} was given with on_stop={on_stop!r}: the run ends at a"
            " signal after on_stop() has saved its checkpoint. Pass both, or neither."
        )
        raise OptionError(message)
    return StopPoint(stop_signals, on_stop)


def _largest(status: int | None) -> int | None:
    """Return the largest exit status of all ranks, None if no rank has one; collective."""
    group = host_group()
    if group is None:
        return status
    value = torch.tensor(-1 if status is None else status, device="cpu")
    dist.all_reduce(value, dist.ReduceOp.MAX, group)
    return int(value) if value >= 0 else None
