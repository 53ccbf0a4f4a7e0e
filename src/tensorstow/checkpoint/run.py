"""Options of a durable run: how often to commit, and what ``extra`` is saved."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.update_on import AccumulationSteps

Extra = Mapping[str, Any]
Checkpoints = Literal["full", "reference"]
DEFAULT_EVERY = "10min"
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d)\s*")


@dataclass(frozen=True, slots=True)
class Interval:
    """How often to commit: after some seconds, or after some steps, or only by hand."""

    seconds: float | None = None
    steps: int | None = None

    @property
    def by_hand(self) -> bool:
        """Whether the run commits by hand alone."""
        return self.seconds is None and self.steps is None

    def is_due(self, step: int, seconds: float) -> bool:
        """Return whether ``step`` commits, which ends ``seconds`` after the last commit."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and seconds >= self.seconds

    @classmethod
    def parse(cls, value: str | int | None) -> "Interval":
        """Read "10min", "90s", "2h", "1d", a number of steps, or None for only by hand."""
        if value is None:
            return cls()
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(steps=value)
        match = _TIME.fullmatch(value.lower()) if isinstance(value, str) else None
        if match is not None and float(match[1]) > 0:
            return cls(seconds=float(match[1]) * _UNITS[match[2]])
        message = (
            f'commit_every={value!r} was given: use a time with its unit ("10min", "90s",'
            ' "2h"), a number of steps (10), or None to commit only by hand.'
        )
        raise OptionError(message)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a durable run."""

    module: torch.nn.Module | None = None
    """The model: gives names, buffers, and the places where new weights are waited for."""
    accumulation_steps: AccumulationSteps = 1
    """Backward passes per step, where updates run during the last one; or a function."""
    commit_every: Interval = field(default_factory=Interval)
    extra: Callable[[], Extra] | None = None
    """Called at the end of each step, and by ``commit()``, for what the caller keeps with it."""
    stop_signals: Mapping[int, int] = field(default_factory=dict)
    """Exit statuses by the numbers of signals, after which the run commits and ends."""
    defers_rows: bool = False
    """Whether rows with a zero gradient are updated when they are next read."""
    checkpoints: Checkpoints = "full"
    """What ``state_dict()`` returns: states, or the name of a snapshot that holds them."""
