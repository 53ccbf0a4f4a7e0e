"""The parts of parameters that a chunk's update on the device consists of."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tensorstow.formats.reference import AdamScalars
from tensorstow.formats.reference_in_format import FormattedStates, adam_reference_in_format
from tensorstow.states.layout import Family


@dataclass(frozen=True, slots=True)
class SegmentUpdate:
    """The part of one parameter whose states are in a chunk, and its update in one step."""

    weight: Tensor
    """1-D, contiguous; its states and its gradient are on the same device."""
    gradient: Tensor
    """float32, bfloat16 or float16; 1-D, contiguous."""
    position: int
    """Of the first element in the chunk's streams; a multiple of ``GROUP``."""
    first: int
    """Index in the parameter of the first element."""
    scalars: AdamScalars
    key: int
    """Of the random bits that inexact formats round with."""
    seed_master: bool


def update_by_reference(
    segments: Sequence[SegmentUpdate], streams: Sequence[Tensor], family: Family
) -> None:
    """Update ``segments`` and the chunk's ``streams`` in place by one step, one after the other."""
    for segment in segments:
        begin, end = segment.position, segment.position + segment.weight.numel()
        own = [
            stream[begin // spec.per : -(-end // spec.per)]
            for stream, spec in zip(streams, family.specs, strict=True)
        ]
        adam_reference_in_format(
            segment.weight,
            segment.gradient,
            FormattedStates(own, family.format, family.amsgrad, segment.first),
            segment.scalars,
            key=segment.key,
            seed_master=segment.seed_master,
        )
