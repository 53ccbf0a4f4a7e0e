"""Chooses the share of the states that the device updates: ``hybrid`` and ``auto`` measure.

[Note: Shares] The bits are the same wherever a chunk is updated, so the first steps of a run
may try any share.

auto    each side alone for one warm-up step, then each for one that is measured; the faster one
        from then on.
hybrid  half of the states on each side for one warm-up step and one that is measured. Its rates set
        the share of a second measured step, whose rates set the share from then on. A side's rate
        is its elements over the time until its last one is updated, while the other side works too.

Each chunk stays on its side as long as the share is the same. Steps that commit are not compared
with steps that do not.
"""

import logging
from collections.abc import Iterable, Sequence
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
    """The share of the states that the device updates: fixed, or measured by a subclass."""

    def __init__(self, shares: Sequence[float], trial: Sequence[bool] = ()) -> None:
        """Begin with the first share, and go on to the next one after each step of the trial.

        ``trial``: for each of its steps, whether it is measured.
        """
        self.share = shares[0]
        """Share of the elements that the device updates in the next step."""
        self._committed = False
        self._took: list[tuple[SideTiming, SideTiming]] = []
        self._trial = list(trial)
        self._shares = iter(shares[1:])

    @property
    def counts(self) -> bool:
        """Return whether the next step is measured."""
        return bool(self._trial) and self._trial[0]

    @property
    def is_final(self) -> bool:
        """Return whether the share is final."""
        return not self._trial

    @property
    def needs_host(self) -> bool:
        """Return whether the host may update states in a later step."""
        return not self.is_final or self.share < 1.0

    @property
    def needs_device(self) -> bool:
        """Return whether the device may update states in a later step."""
        return not self.is_final or self.share > 0.0

    def note(self, host: SideTiming, device: SideTiming, *, commits: bool) -> None:
        """Record a step's timings; the share of the next step may change."""
        # Where every step commits, steps are alike again from the second on.
        unlike, self._committed = commits and not self._committed, commits
        if not self._trial or unlike:
            return
        if self._trial.pop(0):
            self._took.append((host, device))
        # If the shares end before the trial, this step's rates set the next share.
        if self._trial and (share := next(self._shares, None)) is not None:
            self.share = share
        else:
            self._decide(host, device)

    def _decide(self, host: SideTiming, device: SideTiming) -> None:
        """Set the share by the timings of the last step, or of all that were measured."""


class _Hybrid(ShareTuner):
    """``update_on="hybrid"``."""

    def __init__(self) -> None:
        super().__init__((_EVEN, _EVEN), [False, True, True])

    def _decide(self, host: SideTiming, device: SideTiming) -> None:
        """Set the share with which both sides, at their measured rates, end together."""
        if host.elements and device.elements and min(host.seconds, device.seconds) > 0:
            device_rate = device.elements / device.seconds
            host_rate = host.elements / host.seconds
            self.share = device_rate / (device_rate + host_rate)
            logger.info(
                'update_on="hybrid": the device updates %.0f million elements/s, and the host'
                " %.0f: its share is %.3f",
                device_rate / 1e6,
                host_rate / 1e6,
                self.share,
            )


class _Auto(ShareTuner):
    """``update_on="auto"``."""

    def __init__(self) -> None:
        super().__init__((0.0, 1.0, 0.0, 1.0), [False, False, True, True])

    def _decide(self, host: SideTiming, device: SideTiming) -> None:
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


def share_tuner_of(update_on: UpdateOn | None) -> ShareTuner:
    """Return what chooses the device's share under ``update_on``."""
    if isinstance(update_on, float):
        return ShareTuner((update_on,))
    measured = {"hybrid": _Hybrid, "auto": _Auto}.get(update_on or "host")
    return ShareTuner((float(update_on == "device"),)) if measured is None else measured()


def chunks_of_device(chunks: Iterable[Chunk], share: float) -> list[Chunk]:
    """Return whole chunks with ``share`` of the elements, spread evenly among the others.

    So chunks that are read in order bring work for both sides, and a chunk stays on its side when
    more chunks are appended.
    """
    device_chunks: list[Chunk] = []
    owed = 0.0
    for chunk in chunks:
        owed += share * chunk.plan.elements
        # The nearest whole chunk is taken; what is left over is carried to the next ones.
        if owed >= chunk.plan.elements / 2:
            device_chunks.append(chunk)
            owed -= chunk.plan.elements
    return device_chunks


def elements_of(chunks: Iterable[Chunk]) -> int:
    """Return how many elements chunks have, padding included."""
    return sum(chunk.plan.elements for chunk in chunks)
