"""``OffloadPolicy``: the user's choices for states: tier, budget, format, overlap."""

from dataclasses import dataclass, field
from typing import Annotated

import torch

from tensorstow.base.fields import check_fields
from tensorstow.base.update_on import (
    DelayedUpdate,
    OverlapOption,
    UpdateOn,
    UpdateTiming,
    read_update_on,
    timing_of,
)
from tensorstow.formats.state_format import StateFormat
from tensorstow.states.layout import Family, OptionalStates
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Where states are kept (``placement``), in which format, and when updates run."""

    placement: Placement
    policy: PipelinePolicy = field(default_factory=PipelinePolicy)
    overlap: OverlapOption | DelayedUpdate = "none"
    format: StateFormat | None = None
    """None: the smallest exact format if states move, plain fp32 if all stay."""
    update_on: Annotated[UpdateOn, read_update_on] | None = None
    """None: on the host, or on the side that updated the resumed run."""
    is_overlap_chosen: bool = False
    """Whether ``overlap`` is what "auto" meant."""

    def __post_init__(self) -> None:
        """Check every value; raises OptionError."""
        check_fields(self)

    @property
    def timing(self) -> UpdateTiming:
        """What ``overlap`` means."""
        return timing_of(self.overlap)

    def family(self, dtype: torch.dtype, optional: OptionalStates) -> Family:
        """Return the family of a parameter of ``dtype``."""
        state_format = format_of(dtype, self.format, moving=self.moving, ema=optional.ema)
        return Family(dtype, optional.amsgrad, state_format, optional.ema)

    @property
    def moving(self) -> bool:
        """Return whether any states pass through the ring."""
        return self.placement.disk_fraction > 0 or self.placement.durable


def format_of(
    dtype: torch.dtype, wanted: StateFormat | None, *, moving: bool, ema: bool = False
) -> StateFormat:
    """Return the format of the states of a parameter of ``dtype``.

    Without a ``wanted`` one it is the smallest exact format if states move. An average of weights
    (``ema``) needs whole masters.
    """
    if wanted is None:
        wanted = StateFormat.SPLIT if moving and not ema else StateFormat.FP32
    # A split master needs a weight that is its upper half, which only bf16 is.
    if wanted == StateFormat.SPLIT and dtype != torch.bfloat16:
        return StateFormat.FP32
    return wanted
