"""Finds the first difference between a run and its reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorstow.cli.verify.rows import VerifiedRun
from tensorstow.cli.verify.training import Outcome


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a run from its reference."""

    run: VerifiedRun
    description: str


def differences(outcomes: Mapping[VerifiedRun, Outcome]) -> list[Difference]:
    """Return the runs that differ from the first run of their dtype, with the first difference."""
    mismatches = []
    references: dict[str, Outcome] = {}
    for run, outcome in outcomes.items():
        reference = references.setdefault(run.dtype, outcome)
        description = first_difference(outcome, reference)
        if description is not None:
            mismatches.append(Difference(run, description))
    return mismatches


def first_difference(outcome: Outcome, reference: Outcome) -> str | None:
    """Return the first difference in the order of training: a loss, a parameter, or a state."""
    pairs = zip(outcome.losses, reference.losses, strict=False)
    for step, (loss, expected) in enumerate(pairs):
        if loss.hex() != expected.hex():
            return f"the loss of step {step + 1} is {loss!r} instead of {expected!r}"
    if len(outcome.losses) != len(reference.losses):
        return f"it took {len(outcome.losses)} steps instead of {len(reference.losses)}"
    for kind, digests, expected_digests in (
        ("parameter", outcome.digests, reference.digests),
        ("state", outcome.states, reference.states),
    ):
        if digests.keys() != expected_digests.keys():
            return f"it has other {kind}s"
        unequal = [name for name, digest in digests.items() if digest != expected_digests[name]]
        if unequal:
            return f"all losses are equal, and {_named(kind, unequal)} at the end"
    return None


def _named(kind: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"the {kind} {names[0]} differs"
    return f"{len(names)} {kind}s differ, the first is {names[0]},"
