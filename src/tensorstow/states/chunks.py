"""Chunks: the memory of each one's states, and views of it by stream."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from tensorstow.base.sizes import round_up
from tensorstow.formats.state_format import decode, encode
from tensorstow.io.arena import Arena
from tensorstow.states.layout import (
    LARGEST_SMALL,
    ChunkPlan,
    Family,
    RingPlan,
    Segment,
    chunk_bytes,
    cut,
    parts_of,
    space_elements,
)

Weights = Callable[[int], torch.Tensor]
"""The weight of a numbered parameter, in host memory."""
_PAGE = 4096


class Allocation(Protocol):
    """A contiguous range of host memory, zeroed when it is allocated."""

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D view of ``count`` elements from byte ``offset``."""


Allocate = Callable[[int], Allocation]
"""Allocates a number of bytes; the caller keeps the allocation as long as views of it."""
PART_ELEMENTS = 1 << 15
"""Elements that are in fp32 at a time when states are read or set: 128 KiB a state. Temporaries
stay in the cache, and torch starts no threads for so few elements."""


@dataclass(eq=False, slots=True)
class Chunk:
    """A part of a family's states, with ``resident`` memory of its own or none."""

    plan: ChunkPlan
    family: Family
    resident: tuple[torch.Tensor, ...] = ()
    """One 1-D view per stream, in the stream's dtype; empty if the chunk moves."""
    number: int = field(default=-1)
    """The chunk's number in the pipeline."""
    by_rows: bool = False
    """Whether it is cut between rows, and passes through the small slots unless it stays."""
    file_bytes: int = 0
    """The chunk's bytes on disk, alignment included; 0 if it is never on disk."""

    @property
    def is_small(self) -> bool:
        """Return whether it passes through the small slots."""
        return self.by_rows and not self.resident

    @property
    def owners(self) -> Iterator[int]:
        """Return the numbers of the parameters whose states are in it."""
        return (run.parameter for run in self.plan.runs)


def mark_rows(chunks: Iterable[Chunk], parameters: Container[int], *, with_weights: bool) -> None:
    """Let small chunks of ``parameters`` that were cut between rows pass through small slots."""
    for chunk in chunks:
        nbytes = chunk_bytes(chunk.family, chunk.plan.elements, with_weights=with_weights)
        owners = [*chunk.owners]
        is_alone = len(owners) == 1 and owners[0] in parameters
        chunk.by_rows = is_alone and nbytes <= LARGEST_SMALL


class ChunkRing:
    """The buffers that chunks on disk pass through, allocated once."""

    def __init__(self, plan: RingPlan, allocate: Allocate | None = None) -> None:
        """Map the memory without touching its pages, or ``allocate`` it."""
        self.plan = plan
        # A forked child must not share pages that the kernel may be writing to.
        allocate = allocate or partial(Arena, in_children=False)
        self._arena = allocate(plan.nbytes) if plan.nbytes else None
        self.memory: torch.UntypedStorage | None = None
        """The object that keeps the memory alive."""
        self.address = 0
        if self._arena is not None:
            whole = self._arena.tensor(0, plan.nbytes, torch.uint8)
            self.address, self.memory = whole.data_ptr(), whole.untyped_storage()

    def drop_pages(self) -> None:
        """Give the memory back, while no slot is in use; what is touched is there again, as zeros.

        Memory that is pinned for a device stays.
        """
        if isinstance(self._arena, Arena):
            self._arena.drop()

    def streams(self, chunk: Chunk, slot: int) -> tuple[torch.Tensor, ...]:
        """Return the views that hold ``chunk``'s streams while it is in ``slot``."""
        if self._arena is None:
            return ()
        start, _ = self._slot(chunk, slot)
        parts = parts_of(chunk.family, chunk.plan.elements, is_small=chunk.is_small)
        return tuple(
            self._arena.tensor(start + part.slot_at, spec.length(chunk.plan.elements), spec.dtype)
            # The last part is the weight's, which has no stream.
            for part, spec in zip(parts, chunk.family.specs, strict=False)
        )

    def parts(self, chunk: Chunk, slot: int) -> list[torch.Tensor]:
        """Return the same as padded bytes, as they are on disk; last the weight, if it has room."""
        if self._arena is None:
            return []
        start, slot_bytes = self._slot(chunk, slot)
        parts = parts_of(chunk.family, chunk.plan.elements, is_small=chunk.is_small)
        return [
            self._arena.tensor(start + part.slot_at, part.nbytes, torch.uint8)
            for part in parts
            if part.slot_at + part.nbytes <= slot_bytes
        ]

    def _slot(self, chunk: Chunk, slot: int) -> tuple[int, int]:
        """Return the offset and the bytes of a slot of the chunk's kind."""
        plan = self.plan
        if chunk.is_small:
            return plan.slots * plan.slot_bytes + slot * plan.small_bytes, plan.small_bytes
        return slot * plan.slot_bytes, plan.slot_bytes


def place_in_ram(
    family: Family, runs: Sequence[Segment], capacity: int, allocate: Allocate | None = None
) -> tuple[list[Chunk], dict[int, tuple[torch.Tensor, ...]]]:
    """Allocate memory for a space, in chunks of ``capacity``; its pages are zero.

    Returns its chunks, and the fp32 streams of each run as 1-D views by parameter (none where the
    family's format is another).
    """
    elements = space_elements(runs)
    if not elements:
        return [], {}
    specs = family.specs
    allocate = allocate or partial(Arena, in_children=True)
    # One allocation for each stream, so that a state of a parameter is one view over its chunks.
    arenas = [allocate(spec.nbytes(elements)) for spec in specs]
    chunks = []
    for index, plan in enumerate(cut(runs, capacity)):
        views = tuple(
            arena.tensor(
                spec.nbytes(index * capacity),
                spec.length(plan.elements),
                spec.dtype,
            )
            for arena, spec in zip(arenas, specs, strict=True)
        )
        chunks.append(Chunk(plan, family, resident=views))
    if any(spec.dtype != torch.float32 for spec in specs):
        return chunks, {}
    by_parameter = {
        run.parameter: tuple(
            arena.tensor(run.position * 4, run.count, torch.float32) for arena in arenas
        )
        for run in runs
    }
    return chunks, by_parameter


def allocate_resident(chunks: Sequence[Chunk], allocate: Allocate | None = None) -> None:
    """Allocate zeroed memory for resident chunks, in one block for all."""
    # Streams a page apart, so that they never sit a power of two apart. One mapping, because huge
    # pages that are used in part count in full.
    starts: list[int] = []
    end = 0
    for chunk in chunks:
        for spec in chunk.family.specs:
            starts.append(end)
            nbytes = spec.nbytes(chunk.plan.elements)
            end = round_up(end + nbytes, _PAGE) + _PAGE
    if not chunks:
        return
    allocate = allocate or partial(Arena, in_children=True)
    arena = allocate(end)
    places = iter(starts)
    for chunk in chunks:
        chunk.resident = tuple(
            arena.tensor(next(places), spec.length(chunk.plan.elements), spec.dtype)
            for spec in chunk.family.specs
        )


def gather_weight(chunk: Chunk, weights: Weights) -> torch.Tensor:
    """Return the weights of ``chunk``'s elements as one 1-D tensor; gaps are zero.

    Zeros for fp32 parameters, whose states do not hang on them.
    """
    if chunk.family.dtype == torch.float32:
        # A view of one element, which takes no memory.
        return torch.zeros((), dtype=torch.float32, device="cpu").expand(chunk.plan.elements)
    gathered = torch.zeros(chunk.plan.elements, dtype=chunk.family.dtype, device="cpu")
    for run in chunk.plan.runs:
        piece = weights(run.parameter).detach().reshape(-1)[run.start : run.start + run.count]
        gathered[run.position : run.position + run.count] = piece
    return gathered


def slices(
    chunk: Chunk, streams: Sequence[torch.Tensor]
) -> Iterator[tuple[Chunk, list[torch.Tensor]]]:
    """Cut a chunk in memory into parts, each a chunk with its streams, for small fp32 copies."""
    for index, plan in enumerate(cut(chunk.plan.runs, PART_ELEMENTS)):
        begin, end = index * PART_ELEMENTS, index * PART_ELEMENTS + plan.elements
        parts = [
            spec.part(stream, begin, end)
            for stream, spec in zip(streams, chunk.family.specs, strict=True)
        ]
        yield Chunk(plan, chunk.family), parts


def unpack(
    chunk: Chunk, streams: Sequence[torch.Tensor], weights: Weights
) -> dict[str, torch.Tensor]:
    """Decode ``streams`` to fp32 states by name, in the chunk's own order."""
    family = chunk.family
    weight = gather_weight(chunk, weights)
    return decode(streams, weight, family.format, amsgrad=family.amsgrad, ema=family.ema)


def pack(
    chunk: Chunk,
    streams: Sequence[torch.Tensor],
    states: Mapping[str, torch.Tensor],
    weight: torch.Tensor,
) -> None:
    """Write fp32 ``states`` into ``streams``; ``weight`` is what a master rounds to."""
    family = chunk.family
    encode(states, weight, streams, family.format, amsgrad=family.amsgrad, ema=family.ema)


def share_in_ram(new: Sequence[Chunk], disk_fraction: float) -> Iterator[Chunk]:
    """Yield the first chunks of ``new`` whose states stay in RAM, whole chunks only."""
    left = sum(run.count for c in new for run in c.plan.runs)
    left -= round(disk_fraction * left)
    for chunk in new:
        left -= sum(run.count for run in chunk.plan.runs)
        if left < 0:
            return
        yield chunk


def kept_by(allocate: Allocate | None, keeper: list[object]) -> Allocate | None:
    """Return ``allocate``, whose memory ``keeper`` keeps alive; None for None."""
    if allocate is None:
        return None

    def keep(nbytes: int) -> Allocation:
        keeper.append(memory := allocate(nbytes))
        return memory

    return keep
