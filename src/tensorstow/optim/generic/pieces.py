"""Pieces: a whole parameter, or a part of a large one, that moves and is stepped as one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tensorstow.io.scratch import ScratchExtent
from tensorstow.memory.moving_bytes import MovingBytes
from tensorstow.optim.generic.packing import LARGE_BYTES, PackedEntry, TensorSlot, pack, tensors_in
from tensorstow.optim.generic.partition import Partition, can_partition, partition
from tensorstow.optim.generic.stepper import Stepper

How = Literal["ram", "whole", "chunks"]

_SPLIT_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


@dataclass(eq=False, slots=True)
class Piece(MovingBytes):
    """A parameter, or a cut of it, and the place of its states: in the ring unless ABSENT."""

    partition: Partition | None = None
    stowed: dict[str, Any] = field(default_factory=dict)
    """The states on disk, by name, with a TensorSlot in place of each tensor."""
    slots: tuple[TensorSlot, ...] = ()
    extent: ScratchExtent | None = None
    stepped: bool = False
    """Whether it was stepped: its states are known then, and without an extent none are on disk."""
    region: torch.Tensor | None = None
    """Its part of the ring."""
    offset: int = 0
    """Where ``region`` begins."""

    @property
    def least_bytes(self) -> int:
        """Return the size from which a tensor goes to disk: 0 for a chunk."""
        return LARGE_BYTES if self.partition is None else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes that move."""
        return self.extent.nbytes if self.extent is not None else 0


@dataclass(eq=False, slots=True)
class PartitionedParam:
    """A parameter that has states, and its pieces: none if all its states stay in RAM."""

    parameter: torch.Tensor
    shape: torch.Size
    """The shape of this rank's elements."""
    dtype: torch.dtype
    pieces: list[Piece]
    expected: "ExpectedStates"

    @property
    def numel(self) -> int:
        """Return how many elements are stepped."""
        return self.shape.numel()

    @property
    def how(self) -> How:
        """Return how its states are kept."""
        if not self.pieces:
            return "ram"
        return "whole" if self.pieces[0].partition is None else "chunks"

    @property
    def stows(self) -> bool:
        """Return whether some of its states are on disk."""
        return any(piece.extent is not None for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class ExpectedStates:
    """The predicted size of a parameter's states, before its first step."""

    entry: Mapping[str, Any]
    """Its states, as tensors without memory; empty if they cannot be predicted."""
    ram_bytes: int
    disk_bytes: int
    piece_bytes: tuple[int, ...]
    """Bytes in the files, per piece."""


def split_into_pieces(
    parameter: torch.Tensor, *, elements: int, threads: int, elementwise: bool
) -> list[Piece]:
    """Return the pieces in which a parameter's states move.

    Chunks need an elementwise class, a contiguous parameter of a floating dtype, and kernels that
    all divide it among threads in the same way: [Note: Cuts that change no bit].
    """
    if (
        elementwise
        and parameter.numel() > elements
        and parameter.dtype in _SPLIT_DTYPES
        and parameter.is_contiguous()
        and can_partition(parameter.numel(), threads)
    ):
        return [Piece(p) for p in partition(parameter.numel(), elements, threads)]
    return [Piece()]


def expected_states(
    stepper: Stepper,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    pieces: list[Piece],
    whole: torch.Size | None = None,
) -> ExpectedStates:
    """Predict the states of ``parameter`` by a step without memory.

    ``whole``: the shape that is stepped here, where this rank has a part alone.
    """
    entry = stepper.expected_entry(group, parameter, whole)
    if not pieces:
        return ExpectedStates(entry, _bytes_of(entry), 0, ())
    lengths = [None if piece.partition is None else piece.partition.numel for piece in pieces]
    packed: dict[int | None, PackedEntry] = {}
    for numel, piece in zip(lengths, pieces, strict=True):
        # Pieces of one length have the same states: one prediction is enough.
        if numel not in packed:
            shape = whole if numel is None else (numel,)
            piece_entry = stepper.expected_entry(group, parameter, shape)
            packed[numel] = pack(piece_entry, piece.least_bytes)
    entries = [packed[numel] for numel in lengths]
    return ExpectedStates(
        entry,
        _bytes_of(entries[-1].resident),
        sum(slot.nbytes for p in entries for slot in p.slots),
        tuple(p.nbytes for p in entries),
    )


def _bytes_of(entry: Mapping[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(dict(entry)))


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """How the states of one parameter are kept."""

    how: How
    """``ram``: they stay in RAM. ``whole``: they move as one. ``chunks``: in several pieces."""
    pieces: int
    piece_bytes: int
    """The largest piece on disk, as predicted before the first step."""


def plan_of(param: PartitionedParam) -> ParameterPlan:
    """Return how the states of ``param`` are kept."""
    largest = max((piece.nbytes for piece in param.pieces), default=0)
    expected = max(param.expected.piece_bytes, default=0)
    return ParameterPlan(param.how, len(param.pieces), max(largest, expected))
