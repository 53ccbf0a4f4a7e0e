"""Compares the first steps of ``plan="auto"`` with what was predicted, and logs it in one line.

It looks when a step has ended, a few times, at a clock and at counts that are kept anyway: nothing
is waited for, and nothing changes what a step does.
"""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from tensorstow.base.sizes import format_bytes
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.report.rss import peak_bytes, resident_bytes
from tensorstow.report.run_record import Compared, PredictedStep

logger = logging.getLogger("tensorstow")

_STEPS = 4
"""Steps that are seen. The first two make states and buffers; the others are timed."""
_OFF = 0.2
"""As a part of what was predicted: what differs by more is warned of."""


class FirstSteps:
    """What the first steps of a run hold and take."""

    def __init__(
        self, compare: Callable[[StowedAdam], Sequence[Compared]], step: PredictedStep | None
    ) -> None:
        """Watch nothing yet.

        Args:
            compare: Returns the bytes that were predicted, beside those that are there.
            step: What was predicted of a step; None: nothing.
        """
        self._compare = compare
        self._step = step
        self._ends: list[float] = []
        self._resident_before = resident_bytes()

    def watch(self, optimizer: StowedAdam) -> None:
        """Look at the ends of the optimizer's first steps.

        Args:
            optimizer: The optimizer.
        """
        optimizer.register_step_post_hook(self._end)

    def _end(self, optimizer: Any, args: Any, keywords: Any) -> None:  # noqa: ANN401  # torch's own
        del args, keywords
        if len(self._ends) == _STEPS:
            return
        self._ends.append(time.perf_counter())
        if len(self._ends) == _STEPS and not (dist.is_initialized() and dist.get_rank()):
            took = min(later - earlier for earlier, later in list(pairwise(self._ends))[1:])
            level, line = compared_line(self._compare(optimizer), self._step, took)
            logger.log(level, "%s; %s", line, resident_line(self._resident_before, peak_bytes()))


def resident_line(before: int, peak: int | None) -> str:
    """Return how much host memory the process has had, activations among it.

    Args:
        before: Its resident memory when the model was placed, in bytes.
        peak: The most it has had until now; None: the kernel does not record it.
    """
    told = "resident memory, with activations, which no plan counts"
    if peak is None:
        return f"{told}: {format_bytes(before)} when the model was placed, its peak is not recorded"
    return f"{told}: {format_bytes(before)} when the model was placed, {format_bytes(peak)} at most"


def compared_line(
    items: Sequence[Compared], step: PredictedStep | None, seconds: float
) -> tuple[int, str]:
    """Return a log level and a line: bytes of each tier and seconds of a step.

    Args:
        items: Bytes by purpose; what is not counted apart is left out.
        step: What was predicted of a step; None: nothing.
        seconds: What one took.

    Returns:
        WARNING where something differs by more than 20 %, and the line says why that may be.
    """
    told, causes = [], []
    counted = [each for each in items if each.measured is not None]
    for tier in dict.fromkeys(each.tier for each in counted):
        own = [each for each in counted if each.tier == tier]
        predicted, measured = sum(e.predicted for e in own), sum(e.measured or 0 for e in own)
        told.append(
            f"{tier} {format_bytes(predicted)} predicted, {format_bytes(measured)} measured"
        )
        if abs(measured - predicted) > _OFF * predicted:
            worst = max(own, key=lambda each: abs((each.measured or 0) - each.predicted))
            causes.append(f"{tier} differs most in {worst.what}")
    if step is None:
        told.append(f"a step {seconds:.3g} s measured, not predicted without rates and tokens=")
    else:
        told.append(f"a step {step.seconds:.3g} s predicted, {seconds:.3g} s measured")
        if abs(seconds - step.seconds) > _OFF * step.seconds:
            causes.append(
                f"a step was to be bound by {step.binding}: other work there, a rate that has"
                " changed (`tensorstow calibrate`), or tokens= of another batch"
            )
    line = "; ".join(told)
    if not causes:
        return logging.INFO, f"first steps as planned: {line}"
    why = "; ".join(causes)
    return logging.WARNING, f"first steps differ from the plan by more than 20 %: {line} ({why})"
