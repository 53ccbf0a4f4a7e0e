"""Whether the rows computed the same, to the bit."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorstow.cli.demo.result import RowResult
from tensorstow.cli.demo.rows import ROWS

ANCHOR = "ram"
"""The row that the others of ours must equal: everything in RAM."""
_OURS = [row for row in ROWS if row.optimizer == "tensorstow"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison of all rows gave."""

    differing: tuple[str, ...]
    """Keys of our rows whose losses or parameters are not those of the anchor."""
    loss_distance: float
    """The largest |difference| between the losses of the anchor and of torch."""

    @property
    def is_equal(self) -> bool:
        """Return whether all our rows agree."""
        return not self.differing

    def __str__(self) -> str:
        """Return it as one line."""
        distance = f"Losses against torch fused: max |difference| {self.loss_distance:.2g}."
        if self.is_equal:
            return (
                f"All {len(_OURS)} tensorstow rows are bitwise equal: every loss and every final"
                f" parameter. {distance}"
            )
        names = ", ".join(row.name for row in _OURS if row.key in self.differing)
        return (
            f"NOT bitwise equal to everything in RAM: {names}. This is a bug: please report it"
            f" with events.json and the output of `tensorstow doctor`. {distance}"
        )


def judge(results: Sequence[RowResult]) -> Verdict:
    """Compare the losses and the final parameters of all rows."""
    known = {result.key: result for result in results}
    anchor = known[ANCHOR]
    differing = [
        row.key
        for row in _OURS
        if _bits(known[row.key]) != _bits(anchor) or known[row.key].checksum != anchor.checksum
    ]
    pairs = zip(anchor.losses, known["torch"].losses, strict=True)
    return Verdict(tuple(differing), max(abs(ours - theirs) for ours, theirs in pairs))


def _bits(result: RowResult) -> list[str]:
    # As text: NaN equals itself here, and minus zero is not zero.
    return [loss.hex() for loss in result.losses]
