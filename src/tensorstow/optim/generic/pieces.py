"""Pieces: a whole parameter, or a part of a large one, that moves and is stepped as one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch

from tensorstow.io.files import IoFuture
from tensorstow.io.scratch import ScratchExtent
from tensorstow.optim.generic.packing import LARGE_BYTES, PackedEntry, TensorSlot, pack, tensors_in
from tensorstow.optim.generic.partition import Partition, can_partition, partition
from tensorstow.optim.generic.ring import RingBlock
from tensorstow.optim.generic.stepper import Stepper

How = Literal["ram", "whole", "chunks"]

_SPLIT_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


class PieceState(Enum):
    """Where a piece's states are.

    ON_DISK -> READING -> IN_MEMORY -> WRITING -> ON_DISK; a first step begins at IN_MEMORY. All but
    ON_DISK hold a block of the ring.
    """

    ON_DISK = "on disk, or nowhere yet"
    READING = "on their way into memory"
    IN_MEMORY = "in memory, the only place where they are right"
    WRITING = "in memory, on their way to disk"


@dataclass(eq=False, slots=True)
class Piece:
    """A parameter, or a cut of it, and where its states are."""

    partition: Partition | None = None
    stowed: dict[str, Any] = field(default_factory=dict)
    """What is on disk, by name, with a Slot in place of each tensor."""
    slots: tuple[TensorSlot, ...] = ()
    extent: ScratchExtent | None = None
    stepped: bool = False
    """What the class keeps is known: without an extent there is nothing to stow."""
    state: PieceState = PieceState.ON_DISK
    block: RingBlock | None = None
    transfer: IoFuture | None = None

    @property
    def least_bytes(self) -> int:
        """Return from how many bytes on a tensor goes to disk: a chunk's all do."""
        return LARGE_BYTES if self.partition is None else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes that move."""
        return self.extent.nbytes if self.extent is not None else 0


@dataclass(eq=False, slots=True)
class PartitionedParam:
    """A parameter whose states are kept, and its pieces: none if all its states stay in RAM."""

    parameter: torch.Tensor
    shape: torch.Size
    """Of this rank's elements, as the dtype."""
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
    """Of the whole parameter, tensors without memory; empty if they cannot be predicted."""
    ram_bytes: int
    disk_bytes: int
    piece_bytes: tuple[int, ...]
    """Of the files, per piece."""


def split_into_pieces(
    parameter: torch.Tensor, *, elements: int, threads: int, elementwise: bool
) -> list[Piece]:
    """Return the pieces in which a parameter's states move.

    Chunks need an elementwise class, a contiguous parameter of a floating dtype, and kernels that
    all share it alike among threads: [Note: Cuts that change no bit].
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
    stepper: Stepper, group: Mapping[str, Any], parameter: torch.Tensor, pieces: list[Piece]
) -> ExpectedStates:
    """Predict the states of ``parameter`` by a step without memory."""
    entry = stepper.expected_entry(group, parameter)
    if not pieces:
        return ExpectedStates(entry, _bytes_of(entry), 0, ())
    lengths = [None if piece.partition is None else piece.partition.numel for piece in pieces]
    packed: dict[int | None, PackedEntry] = {}
    for numel, piece in zip(lengths, pieces, strict=True):
        if numel not in packed:
            shape = None if numel is None else (numel,)
            kept = stepper.expected_entry(group, parameter, shape)
            packed[numel] = pack(kept, piece.least_bytes)
    each = [packed[numel] for numel in lengths]
    return ExpectedStates(
        entry,
        _bytes_of(each[-1].resident),
        sum(slot.nbytes for p in each for slot in p.slots),
        tuple(p.nbytes for p in each),
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
