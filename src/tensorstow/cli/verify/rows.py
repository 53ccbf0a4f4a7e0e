"""The runs to compare: states in RAM, and every exact way of keeping them on disk."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorstow.base.update_on import Overlap, timing_of

STEPS = 6
COMMITTED = 3
"""Number of steps before the killed run commits; it is killed in a later update."""
_OVERLAPS: tuple[Overlap, ...] = ("none", "forward", "backward")


@dataclass(frozen=True, slots=True)
class VerifiedRun:
    """One run of the model."""

    dtype: str
    """Dtype of the parameters: "fp32" or "bf16"."""
    states: str
    """Placement of the states: "host" or "disk"."""
    state_format: str
    overlap: Overlap = "none"
    is_repeat: bool = False
    """Whether it repeats the reference: torch's own kernels must be deterministic."""
    is_killed: bool = False

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Return the dtype, the medium of the states, their format, and the overlap."""
        medium = "RAM" if self.states == "host" else "disk"
        medium += ", again" * self.is_repeat + ", killed" * self.is_killed
        return self.dtype, medium, self.state_format, self.overlap

    @property
    def title(self) -> str:
        """Return a one-line description."""
        medium = "in RAM" if self.states == "host" else "on disk"
        about = f"{self.dtype}, states {medium} as {self.state_format}"
        timing = timing_of(self.overlap)
        about += f", {timing.keyword}" * timing.is_overlapped
        if self.is_killed:
            about += ", killed and resumed"
        return about + ", again" * self.is_repeat


def runs_of(dtypes: Sequence[str]) -> list[VerifiedRun]:
    """Return the runs; the first of each dtype is its reference."""
    runs = []
    for dtype in dtypes:
        formats = ("fp32",) if dtype == "fp32" else ("fp32", "split")
        runs.append(VerifiedRun(dtype, "host", "fp32"))
        runs.append(VerifiedRun(dtype, "host", "fp32", is_repeat=True))
        runs += [VerifiedRun(dtype, "host", name) for name in formats[1:]]
        runs += [VerifiedRun(dtype, "disk", f, overlap) for f in formats for overlap in _OVERLAPS]
        runs.append(VerifiedRun(dtype, "disk", formats[-1], is_killed=True))
    return runs
