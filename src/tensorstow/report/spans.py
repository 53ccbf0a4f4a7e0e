"""Spans of time by lane, and bytes held over time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensorstow.states.traffic import TraceEvent

COMPUTE = "compute"
"""The lane of the training loop: forward, backward, and the optimizer's step."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """One activity of a lane; times are in seconds since the first step began."""

    lane: str
    name: str
    start: float
    stop: float
    step: int = -1
    """Step of the training loop; -1 for spans outside steps."""
    chunk: int = -1
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes held at one time, in seconds since the first step began."""

    time: float
    nbytes: int


def span_of(event: TraceEvent, lane: str | None = None) -> TimeSpan:
    """Return an event of the pipeline as a span, by default in the event's lane."""
    return TimeSpan(
        lane or event.lane,
        event.lane,
        event.start,
        event.stop,
        chunk=event.chunk,
        nbytes=event.nbytes,
    )


def stack(spans: Sequence[TimeSpan]) -> list[tuple[TimeSpan, int]]:
    """Assign each span the lowest level on which no earlier span is still running."""
    free: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda s: (s.start, s.stop)):
        level = next((i for i, stop in enumerate(free) if stop <= span.start), len(free))
        free[level : level + 1] = [span.stop]
        placed.append((span, level))
    return placed


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times that lie in any of the intervals, as disjoint ones in order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        elif stop > start:
            merged.append((start, stop))
    return merged


def shared(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the times that lie in both of two lists that ``union`` made."""
    overlaps, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if stop > start:
            overlaps.append((start, stop))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def without(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the times of ``left`` that are not in ``right``; ``union`` made both."""
    if not left:
        return []
    end = left[-1][1]
    gaps: list[Interval] = []
    last = left[0][0]
    for start, stop in right:
        gaps.append((last, start))
        last = max(last, stop)
    gaps.append((last, end))
    return shared(left, [gap for gap in gaps if gap[1] > gap[0]])


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the intervals in seconds."""
    return sum(stop - start for start, stop in intervals)
