"""``OffloadPolicy``: what users choose about states: tier, budget, format, overlap."""

from dataclasses import dataclass, field

import torch

from tensorstow.base.update_on import Overlap, UpdateOn
from tensorstow.formats.state_format import StateFormat
from tensorstow.states.layout import Family
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Where states are kept (``placement``), in which format, and when updates run."""

    placement: Placement
    policy: PipelinePolicy = field(default_factory=PipelinePolicy)
    overlap: Overlap = "none"
    format: StateFormat | None = None
    """None: the least bytes that lose nothing where states move, plain fp32 where all stay."""
    update_on: UpdateOn | None = None
    """None: on the host, or as the run that is resumed was updated."""

    def family(self, dtype: torch.dtype, *, amsgrad: bool) -> Family:
        """Return the family of a parameter of ``dtype``."""
        return Family(dtype, amsgrad, format_of(dtype, self.format, moving=self.moving))

    @property
    def moving(self) -> bool:
        """Return whether any states pass through the ring."""
        return self.placement.disk_fraction > 0 or self.placement.durable


def format_of(dtype: torch.dtype, wanted: StateFormat | None, *, moving: bool) -> StateFormat:
    """Return the format of the states of a parameter.

    Args:
        dtype: The parameter's.
        wanted: The user's choice; None: the smallest exact format if states move.
        moving: Whether any states pass through the ring.
    """
    if wanted is None:
        wanted = StateFormat.SPLIT if moving else StateFormat.FP32
    # A split master needs a weight that is its upper half, which only bf16 is.
    if wanted == StateFormat.SPLIT and dtype != torch.bfloat16:
        return StateFormat.FP32
    return wanted
