"""``RunRecord``: the record of a run, and the figures that follow from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tensorstow.report.spans import (
    COMPUTE,
    Interval,
    Sample,
    TimeSpan,
    length,
    shared,
    union,
    without,
)
from tensorstow.states.memory import StateMemory
from tensorstow.states.traffic import Traffic

WAIT = "wait"
UPDATE = "update"
READ = "read"
WRITE = "write"
LINK_DOWN = "link down"
LINK_UP = "link up"
WEIGHTS_READ = "weights read"
WEIGHTS_WRITE = "weights written"
STALL = "stall"
STEP = "opt.step"
_CAUSES = (
    (UPDATE, "updates (computation)"),
    (READ, "reads of states"),
    (WRITE, "writes of states"),
    (LINK_DOWN, "copies from the accelerator"),
    (LINK_UP, "copies to the accelerator"),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """Predicted and measured bytes of one purpose."""

    tier: str
    purpose: str
    predicted: int
    measured: int | None
    """None: not measured separately."""


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A plan's prediction of a step."""

    seconds: float
    binding: str
    """The resource that most of it waits for."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A recorded run; times are in seconds since the recording began."""

    title: str
    spans: Sequence[TimeSpan]
    held: Mapping[str, Sequence[Sample]]
    """Bytes over time by name, such as "process" and "device"."""
    seconds: float
    """How long the recording lasted; 0: nothing was recorded."""
    moved: Mapping[str, int]
    """Bytes moved during the recording, by name."""
    written: int
    """The part of ``moved`` that was written to disks."""
    memory: StateMemory
    traffic: Traffic
    """Traffic since the optimizer was created."""
    disk_bytes: int
    compared: Sequence[Compared] = ()
    predicted: PredictedStep | None = None
    """None: the user chose the plan, or its seconds were not predicted."""
    dropped: int = 0
    """Number of entries lost because a log was full."""

    def lanes(self) -> list[str]:
        """Return the lanes that have spans, in the order of a step."""
        order = (COMPUTE, UPDATE, READ, WRITE, WEIGHTS_READ, WEIGHTS_WRITE, LINK_DOWN, LINK_UP)
        rank = {name: number for number, name in enumerate((*order, WAIT, STALL))}
        used = {span.lane for span in self.spans}
        return sorted(used, key=lambda lane: (rank.get(kind_of(lane), len(rank)), lane))

    def of(self, *kinds: str) -> list[TimeSpan]:
        """Return the spans of lanes of these kinds."""
        return [span for span in self.spans if kind_of(span.lane) in kinds]

    @property
    def step_seconds(self) -> list[float]:
        """Return the time from the end of each step to the end of the next."""
        ends = [span.stop for span in self.of(COMPUTE) if span.name == STEP]
        return [later - earlier for earlier, later in pairwise(ends)]

    @property
    def steps(self) -> int:
        """Return the number of steps that ended during the recording."""
        return sum(span.name == STEP for span in self.of(COMPUTE))


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """The average work of one lane in a step."""

    lane: str
    seconds: float
    nbytes: int
    beside: float
    """Share of the lane's time during forward and backward, when it costs nothing."""

    @property
    def rate(self) -> float:
        """Return bytes per second of busy time."""
        return self.nbytes / self.seconds if self.seconds else 0.0


def kind_of(lane: str) -> str:
    """Return the kind of a lane: its name without the place in brackets."""
    return lane.partition(" (")[0]


def stalls(record: RunRecord) -> list[tuple[str, float]]:
    """Return the seconds that the training loop was blocked, by cause, longest first.

    Time that the loop waits for the pipeline counts for the first of these in progress: an update,
    a read, a write, a copy over the link. So reads count only if no update hides them.
    """
    seconds_by_cause: dict[str, float] = {}
    left = _times(record.of(WAIT))
    for kind, cause in _CAUSES:
        busy = _times(record.of(kind))
        seconds_by_cause[cause] = length(shared(left, busy))
        left = without(left, busy)
    seconds_by_cause["other"] = length(left)
    for span in record.of(STALL):
        seconds_by_cause[span.name] = seconds_by_cause.get(span.name, 0.0) + span.seconds
    causes = [(cause, seconds) for cause, seconds in seconds_by_cause.items() if seconds > 0]
    return sorted(causes, key=lambda pair: -pair[1])


@dataclass(frozen=True, slots=True)
class StepPart:
    """What the training loop does or waits for, in seconds of an average step."""

    name: str
    seconds: float
    beside_updates: float
    """Seconds of these in which updates are computed."""
    beside_transfers: float
    """Seconds of these in which bytes are read, written or copied."""


def step_parts(record: RunRecord) -> list[StepPart]:
    """Return the parts of an average step. Their seconds sum to it.

    Steps count from the end of the first to the end of the last one recorded: what a step leaves
    for the next forward is part of that. A recording of a single step has its whole time.

    What the loop waits for comes first, with the causes of ``stalls``. The rest of a forward, a
    backward and a step is what these compute.
    """
    ends = [span.stop for span in record.of(COMPUTE) if span.name == STEP]
    steps = max(len(ends) - 1, 1)
    seconds_left: list[Interval] = [(ends[0], ends[-1]) if ends[1:] else (0.0, record.seconds)]
    waits = _times(record.of(WAIT))
    busy = {cause: _times(record.of(kind)) for kind, cause in _CAUSES}
    parts = {f"waiting: {cause}": shared(waits, times) for cause, times in busy.items()}
    parts["waiting: other"] = waits
    for name in sorted({span.name for span in record.of(STALL)}):
        parts[f"waiting: {name}"] = _times([s for s in record.of(STALL) if s.name == name])
    for name in dict.fromkeys(span.name for span in record.of(COMPUTE)):
        parts[name] = _times([s for s in record.of(COMPUTE) if s.name == name])
    parts["outside of these"] = seconds_left
    updates = busy.pop(_CAUSES[0][1])
    weights = _times(record.of(WEIGHTS_READ, WEIGHTS_WRITE))
    transfers = union([interval for times in (*busy.values(), weights) for interval in times])
    rows = []
    for name, times in parts.items():
        mine = shared(seconds_left, times)
        seconds_left = without(seconds_left, mine) if mine else seconds_left
        rows.append(
            StepPart(
                name,
                length(mine) / steps,
                length(shared(mine, updates)) / steps,
                length(shared(mine, transfers)) / steps,
            )
        )
    return [part for part in rows if part.seconds > 0]


def lane_figures(record: RunRecord) -> list[LaneFigures]:
    """Return the average figures of a step for each lane that transfers or updates."""
    steps = max(record.steps, 1)
    model = _times([s for s in record.of(COMPUTE) if s.name != STEP])
    blocked = union([*_times(record.of(WAIT)), *_times(record.of(STALL))])
    hidden_by = without(model, blocked)
    figures = []
    for lane in record.lanes():
        if kind_of(lane) in {COMPUTE, WAIT, STALL}:
            continue
        spans = [span for span in record.spans if span.lane == lane]
        busy = _times(spans)
        seconds = length(busy)
        figures.append(
            LaneFigures(
                lane,
                seconds / steps,
                sum(span.nbytes for span in spans) // steps,
                length(shared(busy, hidden_by)) / seconds if seconds else 0.0,
            )
        )
    return figures


def median_step(record: RunRecord) -> float | None:
    """Return the median time of a step; None if fewer than two ended."""
    return median(record.step_seconds) if record.step_seconds else None


def _times(spans: Sequence[TimeSpan]) -> list[Interval]:
    return union((span.start, span.stop) for span in spans)
