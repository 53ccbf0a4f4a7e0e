"""The training loop of every run, and its results for the comparison."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tensorstow
from tensorstow.cli.digests import checksum_of, digests_of, digests_of_states
from tensorstow.cli.process import OPTIMIZER
from tensorstow.cli.verify.rows import COMMITTED, STEPS, VerifiedRun
from tensorstow.cli.verify.subject import Subject
from tensorstow.io.local_share import usable_cores
from tensorstow.states.policy import PipelinePolicy

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

    Args:
        run: Dtype, placement and overlap.
        subject: The model.
        directory: Directory for states on disk; a killed run needs one of its own.
        device: Device that the model computes on.
        progress: Called with the step and the part that begins.
        steps: Total number of steps.
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
