"""The part of a chunk that belongs to one parameter, as update rules take it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tensorstow.formats.reference import AdamScalars

Update = Callable[[Sequence[Tensor]], None]
"""Updates by the streams of a chunk, on the device."""


@dataclass(frozen=True, slots=True)
class SegmentUpdate:
    """The part of one parameter whose states are in a chunk, and its update in one step."""

    weight: Tensor
    """1-D, contiguous; its states and its gradient are on the same device."""
    gradient: Tensor
    """float32, bfloat16 or float16; 1-D, contiguous."""
    position: int
    """Position of the first element in the chunk's streams; a multiple of ``GROUP``."""
    first: int
    """Index in the parameter of the first element."""
    scalars: AdamScalars
    key: int
    """Key of the random bits that inexact formats round with."""
    seed_master: bool
