"""The runs to compare: states in RAM, and every exact way of keeping them on disk."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorstow.base.update_on import Overlap

STEPS = 6
COMMITTED = 3
"""The killed run commits behind this step, and is killed in a later update."""
_OVERLAPS: tuple[Overlap, ...] = ("none", "forward", "backward")


@dataclass(frozen=True, slots=True)
class VerifiedRun:
    """One run of the model."""

    dtype: str
    """Of parameters: "fp32" or "bf16"."""
    states: str
    """Where states are: "host" or "disk"."""
    state_format: str
    overlap: Overlap = "none"
    is_repeat: bool = False
    """The reference once more: torch's own kernels must repeat themselves."""
    is_killed: bool = False

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Return the dtype, where states are, their format, and the overlap, for a table."""
        where = "RAM" if self.states == "host" else "disk"
        where += ", again" * self.is_repeat + ", killed" * self.is_killed
        return self.dtype, where, self.state_format, self.overlap

    @property
    def title(self) -> str:
        """Return a one-line description."""
        where = "in RAM" if self.states == "host" else "on disk"
        about = f"{self.dtype}, states {where} as {self.state_format}"
        if self.overlap != "none":
            about += f', overlap="{self.overlap}"'
        if self.is_killed:
            about += ", killed and resumed"
        return about + ", again" * self.is_repeat


def runs_of(dtypes: Sequence[str]) -> list[VerifiedRun]:
    """Return the runs, those of each dtype behind their reference."""
    runs = []
    for dtype in dtypes:
        formats = ("fp32",) if dtype == "fp32" else ("fp32", "split")
        runs.append(VerifiedRun(dtype, "host", "fp32"))
        runs.append(VerifiedRun(dtype, "host", "fp32", is_repeat=True))
        runs += [VerifiedRun(dtype, "host", name) for name in formats[1:]]
        runs += [VerifiedRun(dtype, "disk", f, overlap) for f in formats for overlap in _OVERLAPS]
        runs.append(VerifiedRun(dtype, "disk", formats[-1], is_killed=True))
    return runs
