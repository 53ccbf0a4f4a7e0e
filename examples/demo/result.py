"""The result of one configuration: losses, time spans, memory, and figures computed from them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import median
from typing import Any, Self

from tensorstow.base.fields import from_fields
from tensorstow.cli.process import OPTIMIZER
from tensorstow.report.spans import COMPUTE, Sample, TimeSpan
from tensorstow.states.memory import StateMemory

DISK_LANES = ("read", "update", "write")


@dataclass(frozen=True, slots=True)
class UlpDifference:
    """The difference of one step of ours from one of torch's, with equal inputs."""

    ulps: float
    """The largest difference, in spacings of fp32 at the largest number that went into it."""
    share: float
    """Share of the weights that differ."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one configuration."""

    key: str
    parameters: int
    losses: tuple[float, ...]
    checksum: str
    """SHA-256 over the names and bytes of all final parameters."""
    spans: tuple[TimeSpan, ...]
    rss: tuple[Sample, ...]
    peak_rss_bytes: int
    end_rss_bytes: int
    predicted: StateMemory | None
    """Prediction from the parameters' sizes; None for stow, whose chunks follow its units."""
    measured: StateMemory
    allocated_file_bytes: int
    """The size of the scratch files, by the filesystem."""
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_spared: int = 0
    """Bytes that were not read, because a buffer still held them."""
    turns: tuple[int, ...] = ()
    """Steps in each turn; the first of a turn begins with idle threads and is not counted."""
    checksums: tuple[str, ...] = ()
    """``checksum`` after each turn, only for the row that the killed run must equal."""
    from_torch: UlpDifference | None = None
    """One further step against torch's, only for the row with everything in RAM."""

    def lane(self, lane: str) -> list[TimeSpan]:
        """Return the spans of one lane."""
        return [span for span in self.spans if span.lane == lane]

    def step_span(self, step: int) -> TimeSpan:
        """Return the span of a whole training step."""
        parts = [s for s in self.lane(COMPUTE) if s.step == step]
        start, stop = min(s.start for s in parts), max(s.stop for s in parts)
        return TimeSpan(COMPUTE, f"step {step + 1}", start, stop, step)

    def optimizer_span(self, step: int) -> TimeSpan:
        """Return the span of ``opt.step()`` in a training step."""
        return next(s for s in self.lane(COMPUTE) if s.name == OPTIMIZER and s.step == step)

    @property
    def step_seconds(self) -> list[float]:
        """Return the time of each training step."""
        return [self.step_span(step).seconds for step in range(len(self.losses))]

    @property
    def optimizer_seconds(self) -> list[float]:
        """Return the time of each call of ``opt.step()``."""
        return [s.seconds for s in self.lane(COMPUTE) if s.name == OPTIMIZER]

    @property
    def steady_steps(self) -> list[int]:
        """Return the steps that begin while the one before is still running, as in a long run."""
        first = set(accumulate(self.turns, initial=0))
        return [step for step in range(len(self.losses)) if step not in first]

    @property
    def steady_seconds(self) -> list[float]:
        """Return the times of these steps."""
        return [self.step_span(step).seconds for step in self.steady_steps]

    @property
    def steady_optimizer_seconds(self) -> list[float]:
        """Return the times of their calls of ``opt.step()``."""
        return [self.optimizer_span(step).seconds for step in self.steady_steps]

    @property
    def moved_bytes(self) -> int:
        """Return the bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def bytes_inside(self) -> float:
        """Return the bytes moved during ``opt.step()``: of a transfer the share that overlaps."""
        calls = [s for s in self.lane(COMPUTE) if s.name == OPTIMIZER]
        transfers = [*self.lane("read"), *self.lane("write")]
        return sum(t.nbytes * _overlap(t, call) for t in transfers for call in calls)

    @property
    def step_bandwidth(self) -> float:
        """Return bytes per second that moved during ``opt.step()``."""
        return self.bytes_inside / sum(self.optimizer_seconds)

    def to_json(self) -> str:
        """Return the result as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Return the result from its JSON values, floats exact to the last bit."""
        return from_fields(cls, said, "A result is JSON, as to_json() writes it")


def steady(result: RunResult) -> float | None:
    """Return the median of the steady steps in seconds; None without any."""
    return median(result.steady_seconds) if result.steady_seconds else None


def spread(values: Sequence[float]) -> float | None:
    """Return (longest - shortest) / median; None for fewer than two values."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


def by_key(results: Iterable[RunResult]) -> dict[str, RunResult]:
    """Return the results by the keys of their configurations."""
    return {result.key: result for result in results}


def _overlap(span: TimeSpan, window: TimeSpan) -> float:
    """Return the share of ``span`` that lies in ``window``."""
    if span.seconds <= 0:
        return float(window.start <= span.start < window.stop)
    shared = min(span.stop, window.stop) - max(span.start, window.start)
    return max(0.0, shared) / span.seconds
