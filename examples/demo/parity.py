"""The comparison in sentences: bitwise equal or not, memory saved, time lost."""

from collections.abc import Sequence
from dataclasses import dataclass

from demo.configurations import ANCHOR, CONFIGURATIONS
from demo.crash import Crash
from demo.result import RunResult, UlpDifference, by_key, spread, steady

SHOWN = "full"
"""The row of the sentence about cost."""
LIMIT = 0.10
"""Limit of other programs' share of our cores, and of the spread of equal steps."""
_OURS = [row for row in CONFIGURATIONS if row.is_ours]
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """The memory that states on disk save and the time that they cost, compared with torch."""

    less_bytes: int
    """Resident memory at the end."""
    state_bytes: int
    """Bytes of the states."""
    seconds: float | None
    torch_seconds: float | None
    """The median steady step; None if there were too few."""
    noise: float | None
    """How far equal steps differ, as (longest - shortest) / median; None if there were too few."""

    def __str__(self) -> str:
        """Return the cost as one sentence."""
        said = f"With its states on disk the process holds {self._memory()} torch's AdamW"
        if self.less_bytes >= _MIB:
            said += f", {self.less_bytes / self.state_bytes:.0%} of what the states take"
        if self.seconds is None or self.torch_seconds is None:
            return f"{said}."
        longer = self.seconds / self.torch_seconds - 1
        if self.noise is not None and abs(longer) <= self.noise:
            compared = f"takes about as long ({self.seconds:.3g} s and {self.torch_seconds:.3g} s)"
        else:
            word = "longer" if longer >= 0 else "shorter"
            seconds = f"({self.seconds:.3g} s instead of {self.torch_seconds:.3g} s)"
            compared = f"is {abs(longer):.0%} {word} {seconds}"
        return f"{said}, for a step that {compared}."

    def _memory(self) -> str:
        if abs(self.less_bytes) < _MIB:
            return "about as much RAM as with"
        more = "less" if self.less_bytes > 0 else "more"
        return f"{abs(self.less_bytes) / _MIB:,.0f} MiB {more} RAM than with"


@dataclass(frozen=True, slots=True)
class Circumstances:
    """How reliable the times are."""

    spread: float | None
    """The largest (longest - shortest) / median over equal steps of one row."""
    others: float | None
    """The share of our cores that other programs used."""
    at_once: bool
    """Whether the rows took turns."""

    @property
    def is_busy(self) -> bool:
        """Return whether other programs used more of the cores than the limit."""
        return (self.others or 0.0) > LIMIT

    @property
    def is_noisy(self) -> bool:
        """Return whether equal steps differ by more than the limit."""
        return (self.spread or 0.0) > LIMIT

    def __str__(self) -> str:
        """Return the circumstances in a sentence or two."""
        facts = []
        if self.spread is not None:
            facts.append(f"equal steps of one configuration differ by up to {self.spread:.0%}")
        if self.others is not None:
            facts.append(f"other programs used {self.others:.0%} of these cores")
        said = " and ".join(facts) or "their spread is not known"
        if self.is_busy:
            said = (
                f"THE MACHINE WAS BUSY: {said} (limit {LIMIT:.0%}). Smaller differences"
                " of times mean nothing: run the demo again when the machine is idle."
            )
        elif self.is_noisy:
            said = f"Times: {said}. Smaller differences of times mean nothing."
        else:
            said = f"Times: {said}."
        turns = "" if self.at_once else (
            " The configurations ran one after another, since memory or disk space is too small for"
            " all at once: load on the machine may have affected only some of them."
        )  # fmt: skip
        return said + turns


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The comparison of all configurations."""

    differing: tuple[str, ...]
    """Keys of our rows whose losses or parameters differ from the anchor's."""
    loss_distance: float
    """The largest |difference| between the losses of the anchor and of torch."""
    from_torch: UlpDifference | None
    cost: Cost
    circumstances: Circumstances
    crash: Crash
    unkilled: str
    """The hash that the killed run must have at the end."""

    @property
    def is_resumed(self) -> bool:
        """Return whether the killed run ended with the same bits as one that was not killed."""
        return self.crash.checksum == self.unkilled

    @property
    def is_equal(self) -> bool:
        """Return whether all of tensorstow's configurations agree, and the killed run too."""
        return not self.differing and self.is_resumed

    def sentences(self) -> list[str]:
        """Return all sentences, the most important first."""
        return [
            str(self.cost),
            self._equality(),
            self._survival(),
            self._torch(),
            str(self.circumstances),
        ]

    def _equality(self) -> str:
        if not self.differing:
            return (
                f"All {len(_OURS)} tensorstow configurations are bitwise equal: every loss and"
                " every final parameter."
            )
        names = "; ".join(row.name for row in _OURS if row.key in self.differing)
        return f"NOT bitwise equal to everything in RAM: {names}. {_BUG}"

    def _survival(self) -> str:
        crash = self.crash
        killed = (
            f"A run of its own was killed (kill -9) in the update of step {crash.committed + 1} and"
            f" went on from its commit of step {crash.committed}: after step {crash.steps} the"
            f" hash of its parameters is {crash.checksum[:8]}"
        )
        if self.is_resumed:
            return f"{killed}, that of the run which was never killed."
        return f"{killed}, NOT {self.unkilled[:8]} as without the kill. {_BUG}"

    def _torch(self) -> str:
        said = (
            "The hash of torch's own optimizer differs, as expected: its kernel rounds"
            " elsewhere (it fuses multiplications with additions, and divides where ours"
            " multiplies; ours gives the same bits on every CPU)."
        )
        if self.from_torch is not None:
            said += (
                " From the same weights, states and gradients, one step of each differs by at most"
                f" {self.from_torch.ulps:.1f} ULP (units in the last place: the distance from one"
                f" fp32 number to the next) in {self.from_torch.share:.0%} of the weights."
            )
        far = f"differ by at most {self.loss_distance:.2g}" if self.loss_distance else "are equal"
        return f"{said} Training feeds that back; losses {far}."


_BUG = "This is a bug: please report it with events.json and the output of `tensorstow doctor`."


def judge(
    results: Sequence[RunResult], crash: Crash, *, others: float | None, at_once: bool
) -> ParityReport:
    """Compare the losses, the final parameters and the costs of all configurations."""
    runs = by_key(results)
    anchor, torch = runs[ANCHOR], runs["torch"]
    differing = [
        row.key
        for row in _OURS
        if _bits(runs[row.key]) != _bits(anchor) or runs[row.key].checksum != anchor.checksum
    ]
    pairs = zip(anchor.losses, torch.losses, strict=True)
    spreads = [s for r in results if (s := spread(r.steady_seconds)) is not None]
    noise = max(spreads, default=None)
    shown = runs[SHOWN]
    return ParityReport(
        differing=tuple(differing),
        loss_distance=max(abs(ours - theirs) for ours, theirs in pairs),
        from_torch=anchor.from_torch,
        cost=Cost(
            torch.end_rss_bytes - shown.end_rss_bytes,
            shown.measured.logical_bytes,
            steady(shown),
            steady(torch),
            noise,
        ),
        circumstances=Circumstances(noise, others, at_once),
        crash=crash,
        unkilled=anchor.checksums[0],
    )


def _bits(result: RunResult) -> list[str]:
    # Compared as text: NaN equals itself, and minus zero differs from zero.
    return [loss.hex() for loss in result.losses]
