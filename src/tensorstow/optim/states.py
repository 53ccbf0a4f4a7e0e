"""The optimizer states of a set of parameters, stowed over RAM and disk."""

import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import tensorstow._native as _native
from tensorstow.base.directories import check_directory, choose_directory
from tensorstow.base.sizes import format_bytes
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File, accepts_direct, scratch_file
from tensorstow.optim.chunks import (
    Chunk,
    Ring,
    chunk_bytes,
    fill,
    load,
    place_in_ram,
    place_on_disk,
    save,
)
from tensorstow.optim.kernels import prepare_kernels
from tensorstow.optim.layout import (
    ChunkPlan,
    Family,
    RingPlan,
    Span,
    StateMemory,
    cut,
    lay_out,
    plan_ring,
    split,
)
from tensorstow.optim.pipeline import UpdatePipeline
from tensorstow.optim.policy import PipelinePolicy

logger = logging.getLogger("tensorstow")


@dataclass(frozen=True, slots=True)
class Placement:
    """What the user decided about where states live."""

    disk_fraction: float
    directories: tuple[Path, ...]
    """Chunks go round these in turn; empty: one is chosen."""
    ram_budget: int | None
    """Bytes for the buffers that states on disk pass through."""


class StateStore:
    """States of parameters, each parameter known by the number it got when it was added."""

    def __init__(self, placement: Placement, policy: PipelinePolicy) -> None:
        """Check the placement; nothing is allocated before ``extend``."""
        split([], placement.disk_fraction)
        for directory in placement.directories:
            check_directory(directory)
        self.placement = placement
        self.policy = policy
        self.pipeline = UpdatePipeline(policy)
        self._chunks: list[Chunk] = []
        self._sizes: list[int] = []
        self._families: list[Family] = []
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._ring = Ring(RingPlan(0, 0, 0))
        self._engine: _native.Engine | None = None
        self._files: list[File] = []
        self._finalizer = weakref.finalize(self, _release, self.pipeline, self._files, os.getpid())
        prepare_kernels()

    def extend(self, sizes: Sequence[int], families: Sequence[Family]) -> range:
        """Add parameters of ``sizes`` elements, their states all zero; return their numbers.

        Raises BudgetError, DirectoryError or OptionError before anything that already exists is
        touched.
        """
        with self.pipeline.lock:
            return self._extend(sizes, families)

    def _extend(self, sizes: Sequence[int], families: Sequence[Family]) -> range:
        self.settle()
        first = len(self._sizes)
        ram: list[Chunk] = []
        views: dict[int, tuple[torch.Tensor, ...]] = {}
        disk: list[tuple[Family, ChunkPlan]] = []
        for family in dict.fromkeys(families):
            numbers = [i for i, f in enumerate(families) if f == family]
            shares = split([sizes[i] for i in numbers], self.placement.disk_fraction)
            in_ram, on_disk = (
                lay_out([Span(first + numbers[s.parameter], s.start, s.stop) for s in spans])
                for spans in shares
            )
            chunks, placed = place_in_ram(family, in_ram)
            ram += chunks
            whole = {r.parameter for r in in_ram if r.count == sizes[r.parameter - first]}
            views |= {p: streams for p, streams in placed.items() if p in whole}
            disk += [(family, plan) for plan in cut(on_disk, self.policy.chunk_elements)]
        plan = self._plan_ring([f for f, _ in disk])
        ring = self._ring if plan == self._ring.plan else Ring(plan)
        files = self._make_files(disk) if disk else []
        chunks = [*self._chunks, *ram, *(place_on_disk(disk, files) if disk else ())]
        if self._engine is None:
            # With all states in RAM nothing is moved: the least of engines will do.
            self._engine = _native.Engine("threads", 1, 4096)
        self.pipeline.connect(self._engine, ring, chunks)
        # Nothing can fail from here on.
        self._chunks, self._ring = chunks, ring
        self._sizes += sizes
        self._families += families
        self._views |= views
        return range(first, first + len(sizes))

    def memory(self) -> StateMemory:
        """Return the bytes that states and buffers take, by place."""
        on_disk = [c for c in self._chunks if c.file is not None]
        in_ram = [c for c in self._chunks if c.file is None]
        disk_bytes = sum(c.state_bytes for c in on_disk)
        ram_bytes = sum(c.state_bytes for c in in_ram)
        return StateMemory(
            logical_bytes=disk_bytes + ram_bytes,
            ram_bytes=ram_bytes,
            disk_bytes=disk_bytes,
            file_bytes=sum(chunk_bytes(c.family, c.plan) for c in on_disk),
            ring_bytes=self._ring.plan.nbytes,
        )

    def views(self, parameter: int) -> dict[str, torch.Tensor]:
        """Return the states of a parameter that is wholly in RAM as 1-D views; else nothing."""
        names = self._families[parameter].streams
        return dict(zip(names, self._views.get(parameter, ()), strict=False))

    def settle(self) -> None:
        """Wait until every write has landed and no buffer is in use."""
        self.pipeline.settle()

    def read(self, parameters: Iterable[int]) -> dict[int, dict[str, torch.Tensor]]:
        """Return copies of the states of ``parameters`` as 1-D fp32 tensors by name."""
        out = {
            p: {
                name: torch.zeros(self._sizes[p], dtype=torch.float32, device="cpu")
                for name in self._families[p].streams
            }
            for p in parameters
        }
        with self.pipeline.lock:
            self.settle()
            wanted = [c for c in self._chunks if any(p in out for p in _owners(c))]
            for chunk, streams in self._in_memory(wanted):
                for run in chunk.plan.runs:
                    # A parameter that was not asked for has no states here to fill.
                    states = out.get(run.parameter, {})
                    for state, stream in zip(states.values(), streams, strict=False):
                        piece = stream[run.position : run.position + run.count]
                        state[run.start : run.start + run.count] = piece
        return out

    def put(self, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Set the states of the parameters of ``states`` (any shape, cast to fp32).

        A state that is not named becomes zero. A failure on the way poisons the store.
        """
        with self.pipeline.lock:
            self.settle()
            for chunk in self._chunks:
                given = [run.parameter in states for run in chunk.plan.runs]
                blank = chunk.file is not None and self.pipeline.state(chunk) == "blank"
                if not any(given) or (blank and not any(states.get(p) for p in _owners(chunk))):
                    continue
                try:
                    self._put_in(chunk, states)
                except BaseException as error:
                    self.pipeline.poison(error)
                    raise

    def _put_in(self, chunk: Chunk, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        for _, streams in self._in_memory([chunk]):
            for name, stream in zip(chunk.family.streams, streams, strict=True):
                fill(chunk, stream, {p: s.get(name) for p, s in states.items()})
            if chunk.file is not None:
                save(chunk, streams)
                self.pipeline.mark_stored(chunk)

    @property
    def engine(self) -> _native.Engine | None:
        """The I/O engine. Tests put faults in here."""
        return self._engine

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where the scratch files are."""
        return tuple(dict.fromkeys(file.path.parent for file in self._files))

    def close(self) -> None:
        """Drop all states, buffers and files. Idempotent."""
        with self.pipeline.lock:
            self._finalizer()
            self._chunks, self._views = [], {}
            self._ring = Ring(RingPlan(0, 0, 0))
            self._engine = None

    def _plan_ring(self, new: Sequence[Family]) -> RingPlan:
        families = [*(c.family for c in self._chunks if c.file is not None), *new]
        return plan_ring(
            streams=max((len(f.streams) for f in families), default=0),
            chunk_elements=self.policy.chunk_elements,
            chunks=len(families),
            budget=self.placement.ram_budget,
            slots=self.policy.most_slots,
        )

    def _make_files(self, plans: Sequence[tuple[Family, ChunkPlan]]) -> list[File]:
        widths = [chunk_bytes(family, plan) for family, plan in plans]
        directories = self.placement.directories or (_choose_directory(sum(widths)),)
        if not self._files or self._engine is None:
            direct = all(accepts_direct(d) for d in directories)
            backend = self.policy.backend if direct else "threads"
            self._engine = open_engine(backend, depth=self.policy.depth)
        made = []
        try:
            for turn, directory in enumerate(directories):
                share = sum(widths[turn :: len(directories)])
                made.append(scratch_file(self._engine, directory, share))
        except BaseException:
            for file in made:
                file.close()
            raise
        self._files += made
        return made

    def _in_memory(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Sequence[torch.Tensor]]]:
        """Bring each chunk's streams into memory in turn; valid until the next is asked for."""
        for chunk in chunks:
            streams = chunk.resident or self._ring.streams(chunk, 0)
            if chunk.file is not None:
                if self.pipeline.state(chunk) == "blank":
                    for stream in streams:
                        stream.zero_()
                else:
                    load(chunk, streams)
            yield chunk, streams


def _owners(chunk: Chunk) -> Iterator[int]:
    return (run.parameter for run in chunk.plan.runs)


def _choose_directory(nbytes: int) -> Path:
    facts = choose_directory(nbytes)
    logger.warning(
        "%s of optimizer states go to scratch files in %s (%s on %s, %s free); name a directory"
        " to choose another place",
        format_bytes(nbytes),
        facts.path,
        facts.filesystem,
        facts.device,
        format_bytes(facts.free_bytes),
    )
    return facts.path


def _release(pipeline: UpdatePipeline, files: Sequence[File], owner: int) -> None:
    """Let go in this order: the pipeline drains into the files, then they are closed."""
    if owner == os.getpid():  # a forked child has neither the threads nor a right to the files
        pipeline.close()
        for file in files:
            file.close()
