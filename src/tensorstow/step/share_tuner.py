"""Chooses the share of the states that the device updates: ``hybrid`` and ``auto`` measure.

[Note: Shares] The bits are the same wherever a chunk is updated, so the first steps of a run
may try any share.

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
class SideTiming:
    """Elements that one side updated in a step, and the seconds that it took."""

    elements: int
    seconds: float


class ShareTuner:
    """Measures steps and chooses the share of the states that the device updates."""

    def __init__(self, update_on: UpdateOn | None) -> None:
        """Begin with the share that ``update_on`` gives, or with the first one to be measured."""
        self._update_on = update_on
        self._committed = False
        self._took: list[tuple[SideTiming, SideTiming]] = []
        self._trial: list[bool] = []
        """For each step that is still to be tried: whether it is measured."""
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
    def is_final(self) -> bool:
        """Return whether the share is final."""
        return not self._trial

    @property
    def chosen(self) -> float | None:
        """Return the share that "auto" has chosen: the other side is no longer needed."""
        return self.share if self._update_on == "auto" and self.is_final else None

    def note(self, host: SideTiming, device: SideTiming, *, commits: bool) -> None:
        """Record a step's timings; the share of the next step may change."""
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

    def _divide(self, host: SideTiming, device: SideTiming) -> None:
        """Set the share with which both sides, at their measured rates, end together."""
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
        """Choose the faster side."""
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
    """Return whole chunks with ``share`` of the elements, spread evenly among the others.

    So chunks that are read in order bring work for both sides, and a chunk stays on its side when
    more chunks are appended.
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
