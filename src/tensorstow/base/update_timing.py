"""``UpdateTiming``: what follows from ``overlap=``, for code that does not itself run updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorstow.base.fields import read_value
from tensorstow.base.update_on import DelayedUpdate, Overlap


@dataclass(frozen=True, slots=True)
class UpdateTiming:
    """When the updates of a step run. Behaviour depends on this, never on the user's word."""

    keyword: str
    """``overlap=`` as users write it."""
    in_forward: bool = False
    """Whether updates run during the next forward: ``step()`` returns before weights are new."""
    in_backward: bool = False
    """Whether updates run during a backward, which moves them on."""

    @property
    def is_overlapped(self) -> bool:
        """Whether updates run outside of ``step()``, next to other work of the host."""
        return self.in_forward or self.in_backward

    @property
    def begins_early(self) -> bool:
        """Whether an update uses its gradient before the norm and scale of all are known."""
        return self.in_backward and not self.in_forward

    @property
    def waits_by_module(self) -> bool:
        """Whether the next forward waits, module by module, until weights are new."""
        return self.in_forward and not self.in_backward


IN_STEP = UpdateTiming('overlap="none"')
_TIMINGS: Mapping[Overlap, UpdateTiming] = {
    "none": IN_STEP,
    "forward": UpdateTiming('overlap="forward"', in_forward=True),
    "backward": UpdateTiming('overlap="backward"', in_backward=True),
}


def timing_of(overlap: object) -> UpdateTiming:
    """Return the timing that a user's ``overlap=`` means; raises OptionError if it means none."""
    value: Any = read_value(Overlap | DelayedUpdate, overlap, "overlap")
    if isinstance(value, DelayedUpdate):
        return UpdateTiming(f"overlap={value}", in_forward=True, in_backward=True)
    return _TIMINGS[value]
