"""Which share of the chunks the device updates: ``hybrid`` and ``auto`` measure it.

[Note: Shares] The bits are the same wherever a chunk is updated, so the first steps of a run may
try what they like: they are steps as any others.

auto    each side alone for a step that does not count, then each for one that does; the faster one
        from then on.
hybrid  half of the states on each side for a step that does not count, and for one that does; then
        by the rates measured there, and by those that this step shows from then on. A side's rate
        is its elements over the time from the step's begin to its last one, while the other works.

Each chunk stays on its side as long as the share is the same. Steps that commit are not compared
with steps that do not.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tensorstow.base.update_on import UpdateOn
from tensorstow.states.chunks import Chunk

logger = logging.getLogger("tensorstow")
_EVEN = 0.5


@dataclass(frozen=True, slots=True)
class Took:
    """What one side did in a step: so many elements in so many seconds from its begin."""

    elements: int
    seconds: float


class Division:
    """The share of the states that the device updates, step by step."""

    def __init__(self, update_on: UpdateOn | None) -> None:
        """Begin with what ``update_on`` asks for, or with what it wants to be tried."""
        self._update_on = update_on
        self._committed = False
        self._took: list[tuple[Took, Took]] = []
        self._trial: list[bool] = []
        """Of the steps that are still to be tried: whether each counts."""
        self._shares: Iterator[float] = iter(())
        if update_on == "auto":
            self._trial, self._shares = [False, False, True, True], iter((1.0, 0.0, 1.0))
        elif update_on == "hybrid":
            self._trial, self._shares = [False, True, True], iter((_EVEN,))
        self.share = _first(update_on)
        """Of the next step."""

    @property
    def counts(self) -> bool:
        """Return whether the next step is measured."""
        return bool(self._trial) and self._trial[0]

    @property
    def is_settled(self) -> bool:
        """Return whether the share stays what it is."""
        return not self._trial

    @property
    def chosen(self) -> float | None:
        """Return the share of "auto" when it has measured: one side is not needed any more."""
        return self.share if self._update_on == "auto" and self.is_settled else None

    def note(self, host: Took, device: Took, *, commits: bool) -> None:
        """Take what a step was like; the next one may have another share."""
        unlike, self._committed = commits and not self._committed, commits
        if not self._trial or unlike:
            return
        if self._trial.pop(0):
            self._took.append((host, device))
        if self._trial and (share := next(self._shares, None)) is not None:
            self.share = share
        elif self._update_on == "hybrid":
            self._divide(host, device)
        elif not self._trial:
            self._choose()

    def _divide(self, host: Took, device: Took) -> None:
        """Let both sides end together, had they gone on as they did."""
        if host.elements and device.elements and min(host.seconds, device.seconds) > 0:
            there = device.elements / device.seconds
            here = host.elements / host.seconds
            self.share = there / (there + here)
            logger.info(
                'update_on="hybrid": the device updates %.0f million elements/s beside the host\'s'
                " %.0f: its share is %.3f",
                there / 1e6,
                here / 1e6,
                self.share,
            )

    def _choose(self) -> None:
        """Take the faster side."""
        (host, _), (_, device) = self._took
        self.share = 1.0 if device.seconds < host.seconds else 0.0
        logger.info(
            'update_on="auto": a step takes %.1f ms on the device and %.1f ms on the host:'
            " updates run on the %s",
            1e3 * device.seconds,
            1e3 * host.seconds,
            "device" if self.share else "host",
        )


def _first(update_on: UpdateOn | None) -> float:
    if isinstance(update_on, float):
        return update_on
    return {"device": 1.0, "hybrid": _EVEN}.get(update_on or "host", 0.0)


def chunks_of_device(chunks: Iterable[Chunk], share: float) -> list[Chunk]:
    """Return ``share`` of the elements, by whole chunks that lie between the others.

    So whatever brings chunks one after the other brings work for both sides; and where more chunks
    come behind them, those stay on their side.
    """
    found: list[Chunk] = []
    owed = 0.0
    for chunk in chunks:
        owed += share * chunk.plan.elements
        if owed >= chunk.plan.elements / 2:
            found.append(chunk)
            owed -= chunk.plan.elements
    return found


def elements_of(chunks: Sequence[Chunk]) -> int:
    """Return how many elements chunks have, padding included."""
    return sum(chunk.plan.elements for chunk in chunks)
