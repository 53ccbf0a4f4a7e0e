"""Moves pieces between disk and the ring: reads ahead, writes in the background.

The ring is one mapping. A piece gets the first free range of it that is large enough.
"""

import time
from collections import deque

import torch

from tensorstow.base.errors import BudgetError
from tensorstow.base.sizes import format_bytes
from tensorstow.io.arena import Arena
from tensorstow.io.free_list import FreeList
from tensorstow.io.scratch import ScratchFiles
from tensorstow.memory.bounded_bytes import BoundedBytes
from tensorstow.memory.moving_bytes import ByteState
from tensorstow.optim.generic.packing import PackedEntry
from tensorstow.optim.generic.pieces import Piece
from tensorstow.states.traffic import Traffic

DEFAULT_RING_BYTES = 64 << 20


class Transfers:
    """Reads and writes of pieces, in the order of the calls."""

    def __init__(self, files: ScratchFiles, budget: int | None) -> None:
        """Begin without memory. ``budget`` bounds it; None lets a larger piece run alone."""
        self._files = files
        self._budget = budget
        self._bytes = BoundedBytes(0)
        self._arena: Arena | None = None
        self._free = FreeList()
        self._writing: deque[Piece] = deque()
        self._read = self._written = self._pieces = 0
        self._wait_seconds = 0.0

    @property
    def capacity(self) -> int:
        """Return the bytes of the ring."""
        return self._bytes.capacity

    def traffic(self) -> Traffic:
        """Return the bytes moved so far."""
        return Traffic(
            self._read, self._written, self._pieces, self._bytes.peak, self._wait_seconds
        )

    def make_room(self, total: int, largest: int) -> None:
        """Size the ring for ``largest``, and for ``total`` as far as the budget allows.

        Nothing may be read ahead. Raises BudgetError where ``largest`` is beyond the budget.
        """
        wanted = wanted_bytes(total, largest, self._budget)
        if wanted > self.capacity:
            # Writes under way read from the ring that is replaced.
            self.wait_written()
            # A forked child must not share pages that the kernel may be writing to.
            self._arena, self._free = Arena(wanted, in_children=False), FreeList()
            self._free.add(0, wanted)
            self._bytes.capacity = wanted

    def read_ahead(self, piece: Piece) -> bool:
        """Start reading ``piece``; return False if the ring has no space for it now."""
        if piece.state is ByteState.WRITING:
            self._finish_until(piece)
        if piece.is_in_memory or piece.extent is None:
            return True
        # Writes that are over give their room back.
        self._reap()
        if not self._allocate(piece, piece.nbytes):
            return False
        piece.begin(ByteState.READING, self._files.read(piece.extent, _region(piece)))
        self._read += piece.nbytes
        return True

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the bytes of ``piece`` once they are in memory."""
        began = time.monotonic()
        while not self.read_ahead(piece):
            self._finish_oldest()
        piece.settle()
        self._wait_seconds += time.monotonic() - began
        return _region(piece)

    def begin(self, piece: Piece, nbytes: int) -> torch.Tensor:
        """Return memory for a piece at rest whose states exist for the first time."""
        while not self._allocate(piece, nbytes):
            self._finish_oldest()
        piece.move(ByteState.PRESENT)
        return _region(piece)

    def write(self, piece: Piece) -> None:
        """Start writing a piece that is here."""
        if piece.extent is None or piece.state is not ByteState.PRESENT:
            return
        piece.begin(ByteState.WRITING, self._files.write(piece.extent, _region(piece)))
        self._writing.append(piece)
        self._written += piece.nbytes
        self._pieces += 1

    def drop(self, piece: Piece) -> None:
        """Discard the read of ``piece``; the disk is unchanged."""
        if piece.state is ByteState.WRITING:
            self._finish_until(piece)
        piece.settle()
        self._rest(piece)

    def put(self, piece: Piece, packed: PackedEntry) -> None:
        """Write ``packed`` to the piece's extent; allocate another one if its size has changed.

        In that case nothing may be read ahead.
        """
        if packed.slots == piece.slots and piece.region is not None:
            region = piece.region
        else:
            if piece.region is not None:
                packed = packed.copied()  # it may lie in the memory that is given back now
            self.drop(piece)
            self._relocate(piece, packed)
            if piece.extent is None:
                return
            region = self.begin(piece, packed.nbytes)
        for slot, tensor in packed.tensors:
            # A state that was stepped in place is in its slot already.
            if tensor.data_ptr() != region.data_ptr() + slot.offset:
                slot.view(region).copy_(tensor)
        piece.stowed = packed.stowed
        self.write(piece)

    def forget(self, piece: Piece) -> None:
        """Drop the states of ``piece``, on disk too: it is new again."""
        self.drop(piece)
        self._relocate(piece, PackedEntry())
        piece.stepped = False

    def wait_written(self) -> None:
        """Wait until every write is complete."""
        while self._writing:
            self._finish_oldest()

    def _relocate(self, piece: Piece, packed: PackedEntry) -> None:
        """Allocate an extent of the size of ``packed`` to a piece at rest, or none."""
        if piece.extent is not None:
            self._files.release([piece.extent])
        piece.extent, piece.stowed, piece.slots = None, {}, ()
        piece.stepped = True
        if packed.nbytes:
            self.make_room(packed.nbytes, packed.nbytes)
            piece.extent = self._files.allocate(packed.nbytes)
            piece.slots = packed.slots

    def _allocate(self, piece: Piece, nbytes: int) -> bool:
        offset = self._free.allocate(nbytes)
        if offset is None or self._arena is None:
            return False
        piece.offset, piece.region = offset, self._arena.tensor(offset, nbytes, torch.uint8)
        self._bytes.take(nbytes)
        return True

    def _finish_until(self, piece: Piece) -> None:
        while piece.state is ByteState.WRITING:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        if not self._writing:
            message = f"Nothing in flight, and no room in a ring of {format_bytes(self.capacity)}."
            raise BudgetError(message)
        piece = self._writing.popleft()
        began = time.monotonic()
        piece.settle()
        self._wait_seconds += time.monotonic() - began
        self._rest(piece)

    def _reap(self) -> None:
        while self._writing and self._writing[0].is_over():
            self._finish_oldest()

    def _rest(self, piece: Piece) -> None:
        if piece.region is not None:
            self._free.add(piece.offset, piece.offset + piece.region.numel())
            self._bytes.give(piece.region.numel())
        piece.region = None
        piece.leave()


def wanted_bytes(total: int, largest: int, budget: int | None) -> int:
    """Return the bytes of a ring: ``total`` within the budget, and at least the largest piece."""
    if budget is not None and largest > budget:
        message = (
            f"A RAM budget of {format_bytes(budget)} was given, and the states of the largest"
            f" piece take {format_bytes(largest)}. Raise ram_budget, or make chunks smaller where"
            " the class is elementwise (PipelinePolicy.chunk_elements)."
        )
        raise BudgetError(message)
    return max(largest, min(DEFAULT_RING_BYTES if budget is None else budget, total))


def _region(piece: Piece) -> torch.Tensor:
    if piece.region is None:
        message = "A piece that is in motion holds a part of the ring."
        raise AssertionError(message)
    return piece.region
