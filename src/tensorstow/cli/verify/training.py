"""The training loop of every run, and the first difference between the results of two.

``python -m tensorstow.cli.verify.training`` is the run that `verify` kills: it reports each part of
a step when the part begins, and trains until it is killed.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tensorstow
from tensorstow.cli.digests import checksum_of, digests_of, digests_of_states
from tensorstow.cli.process import OPTIMIZER, teller
from tensorstow.cli.verify.rows import COMMITTED, STEPS, VerifiedRun
from tensorstow.cli.verify.subject import Subject, subject_of
from tensorstow.io.local_share import usable_cores
from tensorstow.states.policy import PipelinePolicy

_ENDLESS = 1_000_000
_CHUNK = 1 << 16
"""Small, so that a small model has many chunks."""
Announce = Callable[[int, str], None]
"""Function that is called with the step and the part of it that begins."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run."""

    losses: tuple[float, ...]
    """Loss of each step in fp64, which holds every loss exactly; a killed run commits the losses of
    its first process."""
    digests: Mapping[str, str]
    """SHA-256 of each final parameter."""
    states: Mapping[str, str]
    """SHA-256 of each final state of the optimizer."""
    seconds: float

    @property
    def checksum(self) -> str:
        """Return one SHA-256 over all parameters and states."""
        return checksum_of({**self.digests, **self.states})


def train(
    run: VerifiedRun,
    subject: Subject,
    directory: Path,
    device: torch.device,
    progress: Announce,
    *,
    steps: int = STEPS,
) -> Outcome:
    """Train ``steps`` steps, or resume a killed run from its commit.

    A killed run needs a directory of its own.
    """
    torch.set_num_threads(usable_cores())
    begun = time.monotonic()
    model = subject.make(run.dtype, device)
    disk_options: dict[str, Any] = {}
    if run.states == "disk":
        disk_options = {"dir": directory, "durability": "commit" if run.is_killed else "none"}
        if run.is_killed:
            disk_options["commit_every"] = None
    losses: list[float] = []
    with tensorstow.AdamW(
        model.parameters(),
        lr=1e-3,
        states="host" if run.states == "host" else "disk",
        state_format=run.state_format,
        overlap=run.overlap,
        module=model,
        policy=PipelinePolicy(chunk_elements=_CHUNK),
        **disk_options,
    ) as optimizer:
        start = (optimizer.resume() or 0) if run.is_killed else 0
        if start:
            losses = list(optimizer.extra["losses"])
        for step in range(start, steps):
            progress(step, "forward")
            loss = subject.loss(model, step)
            progress(step, "backward")
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            progress(step, OPTIMIZER)
            optimizer.step()
            optimizer.zero_grad()
            if run.is_killed and step + 1 == COMMITTED:
                optimizer.commit({"losses": list(losses)})
        optimizer.synchronize()
        digests, states = digests_of(model), digests_of_states(optimizer, model)
        if run.is_killed:
            optimizer.commit()  # else closing warns of steps that are not committed
    return Outcome(tuple(losses), digests, states, time.monotonic() - begun)


def differences(outcomes: Mapping[VerifiedRun, Outcome]) -> dict[VerifiedRun, str]:
    """Return the first difference of each run from the first run of its dtype, if it has one."""
    references: dict[str, Outcome] = {}
    texts = {
        run: first_difference(outcome, references.setdefault(run.dtype, outcome))
        for run, outcome in outcomes.items()
    }
    return {run: text for run, text in texts.items() if text is not None}


def first_difference(outcome: Outcome, reference: Outcome) -> str | None:
    """Return the first difference in the order of training: a loss, a parameter, or a state."""
    pairs = zip(outcome.losses, reference.losses, strict=False)
    for step, (loss, expected) in enumerate(pairs):
        if loss.hex() != expected.hex():  # tells zeros by their sign, and NaN equals NaN
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


def main() -> None:
    """Train with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="tensorstow.cli.verify.training", description=__doc__)
    for name in ("directory", "dtype", "format", "device"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--model")
    parser.add_argument("--search", nargs="*", default=[], help="directories to import from")
    parser.add_argument("--descriptor", type=int, required=True)
    options = parser.parse_args()
    sys.path += [path for path in options.search if path and path not in sys.path]
    run = VerifiedRun(options.dtype, "disk", options.format, is_killed=True)
    with os.fdopen(options.descriptor, "w", encoding="utf-8") as pipe:
        subject, device = subject_of(options.model), torch.device(options.device)
        train(run, subject, Path(options.directory), device, teller(pipe), steps=_ENDLESS)


if __name__ == "__main__":
    main()
