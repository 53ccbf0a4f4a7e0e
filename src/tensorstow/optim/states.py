"""The optimizer states of a set of parameters, stowed over RAM and disk.

Decides where each element lives (``layout``), owns the memory and the files, and hands steps to
the native pipeline, which moves chunks and updates them without Python.
"""

import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tensorstow import _native
from tensorstow.base.cores import usable_cores
from tensorstow.base.directories import check_directory, choose_directory
from tensorstow.base.errors import ForkError, PoisonedError
from tensorstow.base.sizes import format_bytes
from tensorstow.io.arena import Arena
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File, accepts_direct, scratch_file, stripe, transfer_error
from tensorstow.optim.layout import (
    RESIDENT_CAPACITY,
    STATE_BYTES,
    ChunkPlan,
    Family,
    RingPlan,
    Span,
    StateMemory,
    cut,
    lay_out,
    plan_ring,
    space_elements,
    split,
    stream_bytes,
)
from tensorstow.optim.policy import PipelinePolicy

logger = logging.getLogger("tensorstow")

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As in csrc/kernels/kernels.h."""

_LONGEST_TRACE = 1 << 18


@dataclass(frozen=True, slots=True)
class Placement:
    """What the user decided about where states live."""

    disk_fraction: float
    directories: tuple[Path, ...]
    """Chunks go round these in turn; empty: one is chosen."""
    ram_budget: int | None
    """Bytes for the buffers that states on disk pass through."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One entry of the event log: what ``lane`` did between two times of ``time.monotonic()``."""

    lane: str
    start: float
    stop: float
    chunk: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that states have moved since the optimizer was made."""

    bytes_read: int
    bytes_written: int
    chunks_updated: int
    ring_high_water_bytes: int
    wait_seconds: float
    """Time that ``step()`` was blocked."""


@dataclass(slots=True)
class _Chunk:
    plan: ChunkPlan
    family: Family
    place: tuple[int, int, int]  # file number (-1: resident), offset, bytes of one stream
    resident: tuple[int, ...]  # addresses of the streams
    number: int = -1


@dataclass(slots=True)
class _Resources:
    """What must be let go in this order: the pipeline, then the engine's transfers, then files."""

    engine: _native.Engine | None = None
    pipeline: _native.Pipeline | None = None
    files: tuple[File, ...] = ()
    owner: int = 0

    def release(self) -> None:
        if self.owner != os.getpid():
            return  # a forked child holds neither threads nor a right to the files
        self.pipeline = None
        for file in self.files:
            file.close()
        self.files = ()
        self.engine = None


class StateStore:
    """States of parameters, each known by the number it got when it was added."""

    def __init__(self, placement: Placement, policy: PipelinePolicy) -> None:
        """Check the placement; nothing is allocated before ``extend``."""
        split([], placement.disk_fraction)
        for directory in placement.directories:
            check_directory(directory)
        self.placement = placement
        self.policy = policy
        self._chunks: list[_Chunk] = []
        self._sizes: list[int] = []
        self._families: list[Family] = []
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._arenas: list[Arena] = []
        self._ring: Arena | None = None
        self._ring_plan = RingPlan(0, 0, 0)
        self._past_traffic = Traffic(0, 0, 0, 0, 0.0)
        self._poison: OSError | None = None
        self._tracing = False
        self._past_trace: list[TraceEvent] = []
        self._resources = _Resources(owner=os.getpid())
        self._finalizer = weakref.finalize(self, self._resources.release)
        _native.set_pool_threads(usable_cores())

    # --- what lives where ---

    def extend(self, sizes: Sequence[int], families: Sequence[Family]) -> range:
        """Add parameters of ``sizes`` elements; return their numbers.

        States begin as zeros. Raises BudgetError, DirectoryError or OptionError before anything
        that already exists is touched.
        """
        self.settle()
        first = len(self._sizes)
        chunks: list[_Chunk] = []
        views: dict[int, dict[str, torch.Tensor]] = {}
        disk: list[tuple[Family, ChunkPlan]] = []
        for family in dict.fromkeys(families):
            members = [i for i, f in enumerate(families) if f == family]
            ram_spans, disk_spans = split([sizes[i] for i in members], self.placement.disk_fraction)
            numbers = [first + i for i in members]
            disk += [
                (family, plan)
                for plan in cut(
                    lay_out(_renumber(disk_spans, numbers)), self.policy.chunk_elements
                )
            ]
            resident, new_views = self._place_in_ram(family, _renumber(ram_spans, numbers))
            chunks += resident
            for number, streams in new_views.items():
                if next(iter(streams.values())).numel() == sizes[number - first]:
                    views[number] = streams
        everything = [*(c.family for c in self._chunks if c.place[0] >= 0), *(f for f, _ in disk)]
        ring = self._plan_ring(everything)
        if disk:
            chunks += self._place_on_disk(disk)
        self._chunks += chunks
        self._sizes += sizes
        self._families += families
        self._views |= views
        self._connect(ring)
        return range(first, first + len(sizes))

    def memory(self) -> StateMemory:
        """Return the bytes that states and buffers take, by place."""
        by_place = {True: 0, False: 0}
        file_bytes = 0
        for chunk in self._chunks:
            width = STATE_BYTES * len(chunk.family.streams)
            on_disk = chunk.place[0] >= 0
            by_place[on_disk] += width * sum(run.count for run in chunk.plan.runs)
            if on_disk:
                file_bytes += len(chunk.family.streams) * chunk.place[2]
        return StateMemory(
            logical_bytes=by_place[True] + by_place[False],
            ram_bytes=by_place[False],
            disk_bytes=by_place[True],
            file_bytes=file_bytes,
            ring_bytes=self._ring_plan.nbytes,
        )

    def views(self, parameter: int) -> dict[str, torch.Tensor]:
        """Return the states of a parameter that is wholly in RAM as 1-D views; else nothing."""
        return self._views.get(parameter, {})

    # --- stepping ---

    def prefetch(self) -> None:
        """Start reading the first chunks of the next step, as many as the ring holds."""
        if self.policy.schedule == "pipelined" and self._resources.owner == os.getpid():
            self._pipeline().prefetch()

    def step(self, rows: Sequence[tuple[int, int, int, int, int]], hypers: np.ndarray) -> None:
        """Update every parameter that has a gradient; return once all weights are new.

        ``rows[i]`` is (weight address, gradient address or 0, gradient dtype code, seed master,
        index into ``hypers``) for parameter i; ``hypers`` is (H, 9) float32, see AdamScalars.
        """
        pipeline = self._pipeline()
        columns = np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(-1, 5).T)
        pipeline.begin(*columns, hypers)
        self._check(pipeline.wait_published())
        if self.policy.schedule == "naive":
            self.settle()

    def settle(self) -> None:
        """Wait until every write has landed and no buffer is in use."""
        if self._resources.pipeline is not None:
            self._check(self._pipeline().quiesce())

    # --- states as tensors ---

    def read(self, parameters: Iterable[int]) -> dict[int, dict[str, torch.Tensor]]:
        """Return copies of the states of ``parameters`` as 1-D fp32 tensors by name."""
        self.settle()
        out = {
            p: {name: torch.zeros(self._sizes[p]) for name in self._families[p].streams}
            for p in parameters
        }
        wanted = [c for c in self._chunks if any(run.parameter in out for run in c.plan.runs)]
        for chunk, streams in self._loaded(wanted):
            for run in chunk.plan.runs:
                if run.parameter not in out:
                    continue
                for name, stream in zip(chunk.family.streams, streams, strict=True):
                    piece = stream[run.position : run.position + run.count]
                    out[run.parameter][name][run.start : run.start + run.count] = piece
        return out

    def write(self, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Replace all states: those of ``states`` (any shape, cast to fp32), zeros elsewhere."""
        self.settle()
        for chunk in self._chunks:
            given = any(run.parameter in states for run in chunk.plan.runs)
            on_disk = chunk.place[0] >= 0
            if on_disk and not given and self._state(chunk) == "blank":
                continue
            streams = self._slot_streams(chunk, 0) if on_disk else self._resident_streams(chunk)
            for name, stream in zip(chunk.family.streams, streams, strict=True):
                stream.zero_()
                for run in chunk.plan.runs:
                    source = states.get(run.parameter, {}).get(name)
                    if source is not None:
                        flat = source.detach().reshape(-1)[run.start : run.start + run.count]
                        stream[run.position : run.position + run.count].copy_(flat)
            if on_disk:
                self._write_slot(chunk, streams)

    # --- what happened ---

    def traffic(self) -> Traffic:
        """Return the bytes moved so far."""
        now = self._pipeline().counters() if self._resources.pipeline is not None else {}
        past = self._past_traffic
        high = int(now.get("slots_high_water", 0)) * self._ring_plan.slot_bytes
        return Traffic(
            bytes_read=past.bytes_read + int(now.get("bytes_read", 0)),
            bytes_written=past.bytes_written + int(now.get("bytes_written", 0)),
            chunks_updated=past.chunks_updated + int(now.get("chunks_updated", 0)),
            ring_high_water_bytes=max(past.ring_high_water_bytes, high),
            wait_seconds=past.wait_seconds + float(now.get("wait_seconds", 0.0)),
        )

    def start_trace(self) -> None:
        """Begin an event log (bounded: the first 262,144 events are kept)."""
        self._tracing = True
        self._past_trace = []
        if self._resources.pipeline is not None:
            self._pipeline().start_trace(_LONGEST_TRACE)

    def trace(self) -> list[TraceEvent]:
        """Return the event log so far, empty where none was begun."""
        if self._resources.pipeline is None:
            return self._past_trace
        return [*self._past_trace, *(TraceEvent(*row) for row in self._pipeline().trace())]

    @property
    def engine(self) -> _native.Engine | None:
        """The I/O engine; None where all states are in RAM. Tests put faults in here."""
        return self._resources.engine

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where the scratch files were made."""
        return tuple(dict.fromkeys(file.path.parent for file in self._resources.files))

    def close(self) -> None:
        """Drop all states and files. Idempotent."""
        self._finalizer()

    # --- inside ---

    def _pipeline(self) -> _native.Pipeline:
        if self._resources.owner != os.getpid():
            message = (
                "An optimizer was used in a forked process: its threads, buffers and files belong"
                " to the parent. Make the optimizer in the process that steps it."
            )
            raise ForkError(message)
        if self._poison is not None:
            message = (
                f"This optimizer failed before and its states are half updated: {self._poison}"
                " Load a checkpoint into a new optimizer."
            )
            raise PoisonedError(message) from self._poison
        if self._resources.pipeline is None:
            message = "This optimizer was closed: its states are gone. Make a new one."
            raise PoisonedError(message)
        return self._resources.pipeline

    def _check(self, failure: tuple[int, str, int, int, int, int]) -> None:
        code, operation, number, _, offset, length = failure
        if code:
            path = next(f.path for f in self._resources.files if f.number == number)
            self._poison = transfer_error(path, operation, code, offset, length)
            raise self._poison

    def _plan_ring(self, families: Sequence[Family]) -> RingPlan:
        return plan_ring(
            streams=max((len(f.streams) for f in families), default=0),
            chunk_elements=self.policy.chunk_elements,
            chunks=len(families),
            budget=self.placement.ram_budget,
            slots=1 if self.policy.schedule == "naive" else None,
        )

    def _place_in_ram(
        self, family: Family, spans: Sequence[Span]
    ) -> tuple[list[_Chunk], dict[int, dict[str, torch.Tensor]]]:
        runs = lay_out(spans)
        elements = space_elements(runs)
        if not elements:
            return [], {}
        arenas = {name: Arena(elements * STATE_BYTES, in_children=True) for name in family.streams}
        self._arenas += arenas.values()
        chunks = []
        for index, plan in enumerate(cut(runs, RESIDENT_CAPACITY)):
            skip = index * RESIDENT_CAPACITY * STATE_BYTES
            addresses = tuple(arena.address + skip for arena in arenas.values())
            nbytes = plan.elements * STATE_BYTES
            chunks.append(_Chunk(plan, family, (-1, 0, nbytes), addresses))
        views = {
            run.parameter: {
                name: arena.tensor(run.position * STATE_BYTES, run.count, torch.float32)
                for name, arena in arenas.items()
            }
            for run in runs
        }
        return chunks, views

    def _place_on_disk(self, plans: Sequence[tuple[Family, ChunkPlan]]) -> list[_Chunk]:
        widths = [stream_bytes(plan.elements) * len(family.streams) for family, plan in plans]
        directories = self.placement.directories or (self._choose_directory(sum(widths)),)
        if self._resources.engine is None:
            direct = all(accepts_direct(d) for d in directories)
            backend = self.policy.backend if direct else "threads"
            self._resources.engine = open_engine(backend, depth=self.policy.depth)
        shares = [sum(widths[i :: len(directories)]) for i in range(len(directories))]
        files = []
        for directory, share in zip(directories, shares, strict=True):
            files.append(scratch_file(self._resources.engine, directory, share))
            self._resources.files += (files[-1],)
        ends = dict.fromkeys(range(len(files)), 0)
        chunks = []
        for index, (family, plan) in enumerate(plans):
            file = stripe(files, index)
            offset = ends[index % len(files)]
            ends[index % len(files)] += widths[index]
            place = (file.number, offset, stream_bytes(plan.elements))
            chunks.append(_Chunk(plan, family, place, ()))
        return chunks

    def _choose_directory(self, nbytes: int) -> Path:
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

    def _connect(self, ring: RingPlan) -> None:
        """Make the pipeline anew over all chunks; the states themselves stay where they are."""
        stored = {id(c) for c in self._chunks if c.number >= 0 and self._state(c) == "stored"}
        if self._resources.pipeline is not None:
            self._past_trace = self.trace()
            self._past_traffic = self.traffic()
            self._resources.pipeline = None
        if ring != self._ring_plan:
            self._ring = Arena(ring.nbytes, in_children=False) if ring.slots else None
            self._ring_plan = ring
        if self._resources.engine is None:
            # With all states in RAM nothing is moved; the pipeline's engine is the cheapest one.
            self._resources.engine = _native.Engine("threads", 1, 4096)
        pipeline = _native.Pipeline(
            self._resources.engine,
            self._ring.address if self._ring is not None else 0,
            ring.slots,
            ring.slot_bytes,
            ring.stream_stride,
            self.policy.isa,
        )
        for chunk in self._chunks:
            runs = [(r.parameter, r.start, r.position, r.count) for r in chunk.plan.runs]
            chunk.number = pipeline.add_chunk(
                str(chunk.family.dtype).removeprefix("torch."),
                chunk.family.amsgrad,
                runs,
                chunk.plan.elements,
                chunk.place,
                list(chunk.resident),
                id(chunk) in stored,
            )
        if self._tracing:
            pipeline.start_trace(_LONGEST_TRACE)
        self._resources.pipeline = pipeline

    def _state(self, chunk: _Chunk) -> str:
        return self._pipeline().state(chunk.number)

    def _resident_streams(self, chunk: _Chunk) -> list[torch.Tensor]:
        return [self._at(address, chunk.plan.elements) for address in chunk.resident]

    def _at(self, address: int, elements: int) -> torch.Tensor:
        arena = next(a for a in self._arenas if a.address <= address < a.address + a.nbytes)
        return arena.tensor(address - arena.address, elements, torch.float32)

    def _slot_streams(self, chunk: _Chunk, slot: int) -> list[torch.Tensor]:
        if self._ring is None:
            message = "A chunk on disk without a ring cannot be."
            raise RuntimeError(message)
        plan = self._ring_plan
        elements = chunk.place[2] // STATE_BYTES
        return [
            self._ring.tensor(
                slot * plan.slot_bytes + k * plan.stream_stride, elements, torch.float32
            )
            for k in range(len(chunk.family.streams))
        ]

    def _loaded(self, chunks: Sequence[_Chunk]) -> Iterator[tuple[_Chunk, list[torch.Tensor]]]:
        """Bring each chunk's streams into memory in turn; valid until the next is asked for."""
        for chunk in chunks:
            if chunk.place[0] < 0:
                yield chunk, self._resident_streams(chunk)
                continue
            streams = self._slot_streams(chunk, 0)
            if self._state(chunk) == "blank":
                for stream in streams:
                    stream.zero_()
            else:
                file = self._file(chunk)
                futures = [
                    file.read(stream, chunk.place[1] + k * chunk.place[2])
                    for k, stream in enumerate(streams)
                ]
                for future in futures:
                    future.wait()
            yield chunk, streams

    def _write_slot(self, chunk: _Chunk, streams: Sequence[torch.Tensor]) -> None:
        file = self._file(chunk)
        futures = [
            file.write(stream, chunk.place[1] + k * chunk.place[2])
            for k, stream in enumerate(streams)
        ]
        for future in futures:
            future.wait()
        if self._state(chunk) == "blank":
            self._pipeline().mark_stored(chunk.number)

    def _file(self, chunk: _Chunk) -> File:
        return next(f for f in self._resources.files if f.number == chunk.place[0])


def _renumber(spans: Sequence[Span], numbers: Sequence[int]) -> list[Span]:
    return [Span(numbers[s.parameter], s.start, s.stop) for s in spans]
