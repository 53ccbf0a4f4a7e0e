"""Chunks in their places: the memory or the file that holds one, and how it gets in and out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tensorstow.io.arena import Arena
from tensorstow.io.files import File
from tensorstow.optim.layout import (
    RESIDENT_CAPACITY,
    STATE_BYTES,
    ChunkPlan,
    Family,
    RingPlan,
    Run,
    cut,
    space_elements,
    stream_bytes,
)


@dataclass(eq=False, slots=True)
class Chunk:
    """A cut of a family's states and where it is: in ``resident`` memory or in ``file``."""

    plan: ChunkPlan
    family: Family
    resident: tuple[torch.Tensor, ...] = ()
    """One 1-D fp32 view per stream; empty on disk."""
    file: File | None = None
    offset: int = 0
    """Byte in the file where the first stream begins; the others follow it."""
    number: int = field(default=-1)
    """What the pipeline calls it."""

    @property
    def stream_bytes(self) -> int:
        """Return the bytes of one stream, alignment included."""
        return stream_bytes(self.plan.elements)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of states in it, padding excluded."""
        elements = sum(run.count for run in self.plan.runs)
        return STATE_BYTES * len(self.family.streams) * elements


class Ring:
    """The buffers that chunks on disk pass through, allocated once."""

    def __init__(self, plan: RingPlan) -> None:
        """Map the memory; no page of it is touched yet."""
        self.plan = plan
        # A forked child must not share pages that the kernel may be writing to.
        self._arena = Arena(plan.nbytes, in_children=False) if plan.slots else None
        self.address = self._arena.address if self._arena is not None else 0

    def streams(self, chunk: Chunk, slot: int) -> tuple[torch.Tensor, ...]:
        """Return the views that hold ``chunk``'s streams while it is in ``slot``."""
        if self._arena is None:
            return ()
        start, stride = slot * self.plan.slot_bytes, self.plan.stream_stride
        elements = chunk.stream_bytes // STATE_BYTES
        return tuple(
            self._arena.tensor(start + k * stride, elements, torch.float32)
            for k in range(len(chunk.family.streams))
        )


def place_in_ram(
    family: Family, runs: Sequence[Run]
) -> tuple[list[Chunk], dict[int, tuple[torch.Tensor, ...]]]:
    """Allocate memory for a space; pages are zero until they are touched.

    Returns its chunks, and the streams of each run as 1-D views by parameter.
    """
    elements = space_elements(runs)
    if not elements:
        return [], {}
    arenas = [Arena(elements * STATE_BYTES, in_children=True) for _ in family.streams]
    chunks = []
    for index, plan in enumerate(cut(runs, RESIDENT_CAPACITY)):
        skip = index * RESIDENT_CAPACITY * STATE_BYTES
        views = tuple(arena.tensor(skip, plan.elements, torch.float32) for arena in arenas)
        chunks.append(Chunk(plan, family, resident=views))
    by_parameter = {
        run.parameter: tuple(
            arena.tensor(run.position * STATE_BYTES, run.count, torch.float32) for arena in arenas
        )
        for run in runs
    }
    return chunks, by_parameter


def place_on_disk(
    plans: Sequence[tuple[Family, ChunkPlan]], files: Sequence[File]
) -> Iterator[Chunk]:
    """Give each chunk its bytes in ``files``, which chunks go round in turn."""
    ends = [0] * len(files)
    for index, (family, plan) in enumerate(plans):
        turn = index % len(files)
        yield Chunk(plan, family, file=files[turn], offset=ends[turn])
        ends[turn] += chunk_bytes(family, plan)


def chunk_bytes(family: Family, plan: ChunkPlan) -> int:
    """Return the bytes of a file that one chunk takes."""
    return stream_bytes(plan.elements) * len(family.streams)


def fill(chunk: Chunk, stream: torch.Tensor, states: Mapping[int, torch.Tensor | None]) -> None:
    """Set one stream of ``chunk`` for the parameters of ``states``; None stands for zeros.

    A source may be the stream itself: what users read in RAM and load again.
    """
    for run in chunk.plan.runs:
        if run.parameter not in states:
            continue
        target = stream[run.position : run.position + run.count]
        source = states[run.parameter]
        if source is None:
            target.zero_()
        else:
            target.copy_(source.detach().reshape(-1)[run.start : run.start + run.count])


def load(chunk: Chunk, streams: Sequence[torch.Tensor]) -> None:
    """Read a chunk on disk into ``streams``; return once it is there."""
    if chunk.file is not None:
        offsets = range(chunk.offset, chunk.offset + (1 << 62), chunk.stream_bytes)
        futures = [chunk.file.read(s, at) for s, at in zip(streams, offsets, strict=False)]
        for future in futures:
            future.wait()


def save(chunk: Chunk, streams: Sequence[torch.Tensor]) -> None:
    """Write ``streams`` to a chunk on disk; return once it is there."""
    if chunk.file is not None:
        offsets = range(chunk.offset, chunk.offset + (1 << 62), chunk.stream_bytes)
        futures = [chunk.file.write(s, at) for s, at in zip(streams, offsets, strict=False)]
        for future in futures:
            future.wait()
