"""Which methods may be called in which state of a step: one table for all schedules.

[Note: Legal calls] With overlap="backward" a step begins with its first final gradient and ends
with ``step()``; in between, some weights are new and some are old. The other schedules have no such
phases: everything that they start can be waited for, so they are always between steps. In every
phase an optimizer that has failed refuses all but ``resume()`` and ``close()`` (PoisonedError).
``LEGAL`` is the table.
"""

from enum import Enum
from typing import NoReturn

from tensorstow.base.errors import OptionError
from tensorstow.tensors.placeholder import ABORT_ADVICE


class Phase(Enum):
    """Where an optimizer is in its step."""

    BETWEEN = "between steps"
    USED = "the gradients in .grad are those of the last step"
    RUNNING = "backward is running"
    OPEN = "backward has ended, and step() was not called"
    BROKEN = "the open step can never be completed"


class PublicCall(Enum):
    """A call of an optimizer or its model."""

    FORWARD = "A forward or wait()"
    BACKWARD = "A backward"
    STEP = "step()"
    ZERO_GRAD = "zero_grad()"
    WHOLE = "Something that needs whole states, or changes them,"
    """``state_dict()``, ``commit()``, ``load_state_dict()``, ``add_param_group()`` and the like."""
    RESUME = "resume()"
    CLOSE = "close()"


_ENDS = frozenset({PublicCall.RESUME, PublicCall.CLOSE})
LEGAL: dict[Phase, frozenset[PublicCall]] = {
    Phase.BETWEEN: frozenset(PublicCall),
    Phase.USED: frozenset(PublicCall) - {PublicCall.BACKWARD, PublicCall.STEP},
    # A checkpoint runs its forward again during backward.
    Phase.RUNNING: _ENDS | {PublicCall.FORWARD, PublicCall.BACKWARD},
    Phase.OPEN: _ENDS | {PublicCall.STEP},
    Phase.BROKEN: _ENDS,
}

_WAYS: dict[Phase, str] = {
    Phase.USED: "Call zero_grad() first, then backward.",
    Phase.RUNNING: "Let backward end, then call step().",
    Phase.OPEN: (
        "Call step() first, which ends the step. Several backward passes per step need"
        " accumulation_steps=, or all but the last under `with optimizer.accumulate():`. To give"
        f' the step up instead: with overlap="speculative", zero_grad(); else {ABORT_ADVICE}.'
    ),
    Phase.BROKEN: f"Half a step can be neither completed nor undone: {ABORT_ADVICE}.",
}


def refuse(call: PublicCall, phase: Phase, why: str) -> NoReturn:
    """Raise OptionError: ``call`` is not legal in ``phase``."""
    message = (
        f'{call.value} was requested, and {why}: with overlap="backward" or "speculative" gradients'
        f" have been used by then. {_WAYS[phase]}"
    )
    raise OptionError(message)
