"""The store of states of numbered parameters: adds, steps, reads and loads them."""

import os
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tensorstow._native as _native
from tensorstow.base.directories import make_directories
from tensorstow.base.errors import OptionError
from tensorstow.base.update_on import IN_STEP, UpdateTiming
from tensorstow.formats.state_format import StateFormat
from tensorstow.io.files import IoFuture, wait_for_all
from tensorstow.states.chunks import (
    Allocate,
    Chunk,
    ChunkRing,
    Weights,
    allocate_resident,
    gather_weight,
    kept_by,
    mark_rows,
    pack,
    place_in_ram,
    share_in_ram,
    slices,
    unpack,
)
from tensorstow.states.kernels import prepare_kernels
from tensorstow.states.layout import (
    RESIDENT_CAPACITY,
    ElementRange,
    Family,
    RingPlan,
    RowChunks,
    Segment,
    chunk_bytes,
    cut,
    lay_out,
    parts_of,
    plan_small_slots,
    slot_bytes,
    split,
)
from tensorstow.states.memory import StateMemory, chunk_state_bytes, plan_host
from tensorstow.states.native_handle import Resources
from tensorstow.states.native_pipeline import UpdatePipeline, poisoning
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.scratch import ScratchStorage
from tensorstow.states.stored import StoreStorage
from tensorstow.states.stored_chunks import NOWHERE, StoredChunk, StoredChunks

Transferring = Callable[[torch.Tensor, int], IoFuture]
ChunkStorage = ScratchStorage | StoreStorage


class ChunkTransfers:
    """Reads and writes chunks through the first slot of the ring."""

    def __init__(self, stored: StoredChunks, storage: ChunkStorage) -> None:
        """Move chunks at the positions in ``stored``, in the files of ``storage``."""
        self._stored = stored
        self._storage = storage

    def in_memory(
        self, chunks: Sequence[Chunk], ring: ChunkRing
    ) -> Iterator[tuple[Chunk, Sequence[torch.Tensor]]]:
        """Yield each chunk's streams in memory, valid until the next iteration."""
        for chunk in chunks:
            # After a resume a chunk that is to stay in RAM is on disk until it is used.
            if chunk.resident and self._stored.state(chunk) == "resident":
                yield chunk, chunk.resident
                continue
            streams = ring.streams(chunk, 0)
            if self._stored.state(chunk) == "blank":
                for stream in streams:
                    stream.zero_()
            else:
                self.load(chunk, ring)
                self._stored.check_intact(chunk, streams)
            yield chunk, streams

    def load(self, chunk: Chunk, ring: ChunkRing) -> None:
        """Read a chunk's streams into the ring's first slot."""
        number, offset = self._stored.place(chunk)
        _move(chunk, ring, self._storage.file(number).read, offset)

    def save(self, chunk: Chunk, ring: ChunkRing) -> None:
        """Write the ring's first slot to the place of the chunk's next write."""
        number, offset = self._stored.target_of(chunk)
        _move(chunk, ring, self._storage.file(number).write, offset)

    def keep(self, chunk: Chunk, ring: ChunkRing, streams: Sequence[torch.Tensor]) -> None:
        """Make the changed ``streams`` of ``in_memory`` the chunk's states."""
        # `rewritten` copies the streams of the others to their own memory.
        if not chunk.resident:
            self.save(chunk, ring)
        self._stored.rewritten(chunk, streams)


def _move(chunk: Chunk, ring: ChunkRing, start: Transferring, offset: int) -> None:
    # The states alone: the ring's views may also have the weight.
    parts = parts_of(chunk.family, chunk.plan.elements)[:-1]
    views = ring.parts(chunk, 0)
    futures: list[IoFuture] = []
    try:
        # One by one: after an error the list has those that have begun.
        futures.extend(start(v, offset + p.file_at) for v, p in zip(views, parts, strict=False))
    finally:
        wait_for_all(futures)


@dataclass(frozen=True, slots=True)
class StateSlice:
    """fp32 states of a run of a parameter's elements from ``start`` on, by name, 1-D."""

    parameter: int
    start: int
    states: Mapping[str, torch.Tensor]
    """Valid until the next iteration."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The user's choice of where states are kept."""

    disk_fraction: float
    directories: tuple[Path, ...]
    """Directories that chunks alternate between; empty: one is chosen."""
    ram_budget: int | None
    """Bytes for the buffers that states on disk pass through, and for states that stay."""
    durable: bool = False
    """Whether commits outlive the process; otherwise files are scratch."""


def _no_weights(number: int) -> torch.Tensor:
    message = (
        f"No weight was given for parameter {number}: the states of 16-bit parameters need it."
    )
    raise OptionError(message)


class StateStore:
    """States of parameters; a parameter's number is assigned when it is added."""

    def __init__(
        self,
        placement: Placement,
        policy: PipelinePolicy,
        weights: Weights = _no_weights,
        storage: ChunkStorage | None = None,
        timing: UpdateTiming = IN_STEP,
        allocate: Allocate | None = None,
    ) -> None:
        """Check the placement; nothing is allocated before ``extend``.

        ``weights`` returns the parameter of a number, in host memory; ``storage`` holds states on
        disk (default: scratch files); ``allocate`` returns memory for states (default: any
        memory).
        """
        split([], placement.disk_fraction)
        if storage is None:
            make_directories(placement.directories)
        self.placement = placement
        self.policy = policy
        self.weights = weights
        self.pipeline = UpdatePipeline(policy, timing)
        self._copies = 2 if timing.can_undo else 1
        """Places on disk of each chunk."""
        self.storage = storage or ScratchStorage(
            placement.directories, policy, moving=placement.disk_fraction > 0
        )
        self.chunks: list[Chunk] = []
        """All chunks, in the order of their first parameters; those of one group together."""
        self.sizes: list[int] = []
        self.families: list[Family] = []
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._ring = ChunkRing(RingPlan(0, 0))
        self._allocate = allocate
        self._by_rows: set[int] = set()
        """Parameters whose chunks are cut between rows."""
        self._budget_used = 0
        """Bytes of the RAM budget that states use which stay in RAM."""
        self._transfers = ChunkTransfers(self.pipeline.stored, self.storage)
        resources = self.pipeline.handle.resources
        self._finalizer = weakref.finalize(self, _release, resources, self.storage, os.getpid())
        prepare_kernels(policy)

    def keep(self) -> None:
        """Keep files and threads until ``close``, ``leave`` or ``abandon``."""
        held = self._finalizer.detach()
        if held is not None:
            # The arguments of `_release`, which the finalizer would have called.
            _KEPT[id(self.pipeline.handle.resources)] = held[2]

    def abandon(self) -> None:
        """Give the resources back to the garbage collector: another store or process has them."""
        _KEPT.pop(id(self.pipeline.handle.resources), None)

    def extend(
        self,
        sizes: Sequence[int],
        families: Sequence[Family],
        capacity: int = RESIDENT_CAPACITY,
        chunk_groups: Sequence[Hashable] = (),
    ) -> range:
        """Add parameters of ``sizes`` elements, their states all zero; return their numbers.

        States in RAM are cut every ``capacity`` elements. ``chunk_groups``: the group of each
        parameter; parameters of different groups share no chunk; empty: all are of one group.
        Raises BudgetError, DirectoryError or OptionError before it changes any existing state.
        """
        with self.pipeline.lock:
            self.pipeline.wait_idle()
            first = len(self.sizes)
            chunks, views = self._cut(
                first, sizes, families, capacity, chunk_groups or [None] * len(sizes)
            )
            self._connect(chunks, *self._plan_ring(chunks))
            self.sizes += sizes
            self.families += families
            self._views |= views
            return range(first, first + len(sizes))

    def restore(
        self,
        sizes: Sequence[int],
        families: Sequence[Family],
        chunks: Sequence[Chunk],
        stored: Sequence[StoredChunk],
        by_rows: Iterable[int] = (),
    ) -> None:
        """Adopt states on disk into an empty store, without reading them.

        ``by_rows``: parameters whose chunks may have been cut between rows.
        """
        with self.pipeline.lock:
            self._by_rows.update(by_rows)
            mark_rows(chunks, self._by_rows, with_weights=self.storage.durable)
            self._connect(chunks, *self._plan_ring(chunks), stored)
            self.sizes += sizes
            self.families += families

    def check_budget(self, chunks: Sequence[Chunk]) -> None:
        """Raise BudgetError unless ``chunks`` alone fit into the budget."""
        plan_host(
            [(c.family, c.plan, 1) for c in chunks],
            budget=self.placement.ram_budget,
            slots=self.policy.most_slots,
            with_weights=self.storage.durable,
        )

    def cut_chunks(
        self, sizes: Sequence[int], families: Sequence[Family], chunk_groups: Sequence[Hashable]
    ) -> list[Chunk]:
        """Return the chunks that ``extend`` would add to an empty store with commits."""
        return self._cut(0, sizes, families, RESIDENT_CAPACITY, chunk_groups)[0]

    def _cut(
        self,
        first: int,
        sizes: Sequence[int],
        families: Sequence[Family],
        capacity: int,
        chunk_groups: Sequence[Hashable],
    ) -> tuple[list[Chunk], dict[int, tuple[torch.Tensor, ...]]]:
        # A commit also writes chunks in RAM, so with commits all have one size.
        fraction = 1.0 if self.storage.durable else self.placement.disk_fraction
        chunks: list[Chunk] = []
        views: dict[int, tuple[torch.Tensor, ...]] = {}
        for family in dict.fromkeys(families):
            numbers = [i for i, f in enumerate(families) if f == family]
            group = max(spec.per for spec in family.specs)
            shares = split([sizes[i] for i in numbers], fraction, group=group)
            # The parameters of a group have two spaces, one in RAM and one on disk, cut separately.
            for unit in dict.fromkeys(chunk_groups[i] for i in numbers):
                in_ram, on_disk = (
                    lay_out(
                        [
                            ElementRange(first + numbers[s.parameter], s.start, s.stop)
                            for s in spans
                            if chunk_groups[numbers[s.parameter]] == unit
                        ]
                    )
                    for spans in shares
                )
                placed, streams_by_parameter = place_in_ram(
                    family, in_ram, capacity, kept_by(self._allocate, self.pipeline.memory)
                )
                # Views of a parameter whose states are partly on disk would show a part of them.
                whole = {r.parameter for r in in_ram if r.count == sizes[r.parameter - first]}
                views |= {p: s for p, s in streams_by_parameter.items() if p in whole}
                chunks += placed
                size = self.policy.chunk
                if isinstance(unit, RowChunks):
                    size = unit.elements
                    self._by_rows.update(run.parameter for run in on_disk)
                moving = [Chunk(plan, family) for plan in cut(on_disk, size)]
                mark_rows(moving, self._by_rows, with_weights=self.storage.durable)
                chunks += moving
        # The loops above go by family first, and chunks of one group must come together.
        place = {unit: index for index, unit in enumerate(dict.fromkeys(chunk_groups))}

        def rank(chunk: Chunk) -> tuple[int, int]:
            number = next(chunk.owners)
            return place[chunk_groups[number - first]], number

        return sorted(chunks, key=rank), views

    def _plan_ring(self, new: Sequence[Chunk]) -> tuple[ChunkRing, int]:
        """Allocate memory for new chunks that stay in RAM.

        Return the ring for all chunks, and the bytes of the budget that the new ones take.
        """
        durable = self.storage.durable
        share = list(share_in_ram(new, self.placement.disk_fraction)) if durable else []
        shared = set(share)
        # What has its place already; of the others as many stay in RAM as the budget buys.
        placed = [c for c in self.chunks if not c.is_small and (durable or not c.resident)]
        movable = [c for c in new if not (c.resident or c.by_rows) and c not in shared]
        budget = self.placement.ram_budget
        small = plan_small_slots(
            [
                slot_bytes(c.family, c.plan.elements, with_weights=durable, is_small=True)
                for c in (*self.chunks, *new)
                if c.is_small and c not in shared
            ],
            budget=budget,
            slots=self.policy.most_slots,
        )
        plan = plan_host(
            [(c.family, c.plan, 1) for c in (*placed, *share, *movable)],
            budget=None if budget is None else budget - self._budget_used - small.nbytes,
            slots=self.policy.most_slots,
            with_weights=durable,
            at_home=len(placed) + len(share),
        )
        # `plan_host` counts chunks that are not at home yet, from the first on.
        bought = movable[: plan.resident]
        allocate_resident([*share, *bought], kept_by(self._allocate, self.pipeline.memory))
        nbytes = sum(c.family.state_bytes(c.plan.elements) for c in bought)
        plan_of_all = replace(small, slots=plan.ring.slots, slot_bytes=plan.ring.slot_bytes)
        is_same = plan_of_all == self._ring.plan
        return self._ring if is_same else ChunkRing(plan_of_all, self._allocate), nbytes

    def streams_at(self, chunk: Chunk, slot: int) -> Sequence[torch.Tensor]:
        """Return the streams of a chunk in a slot of the ring, or (-1) in its own memory."""
        return chunk.resident if slot < 0 else self._ring.streams(chunk, slot)

    def _connect(
        self,
        chunks: Sequence[Chunk],
        ring: ChunkRing,
        budget_bytes: int,
        stored: Sequence[StoredChunk] = (),
    ) -> None:
        on_disk = [c for c in chunks if self.storage.durable or not c.resident]
        for chunk in on_disk:
            chunk.file_bytes = chunk_bytes(
                chunk.family, chunk.plan.elements, with_weights=self.storage.durable
            )
        # First, because a disk may be full: the pipeline does not know the chunks yet.
        reserved = self.storage.reserve([c.file_bytes for c in on_disk] * self._copies)
        places = dict(zip(on_disk, reserved, strict=False))
        # With commits a chunk has no place until a commit includes it.
        stored = stored or [
            StoredChunk(NOWHERE if self.storage.durable else places.get(c, NOWHERE)) for c in chunks
        ]
        self.pipeline.connect(self.storage.open_engine(), ring, chunks, stored, self.storage.path)
        for chunk, place in places.items():
            self.pipeline.stored.target(chunk, place)
        # The second half is there if steps may be undone.
        for chunk, place in zip(on_disk, reserved[len(on_disk) :], strict=False):
            self.pipeline.stored.spare(chunk, place)
        self.chunks += chunks
        self._budget_used += budget_bytes
        self._ring = ring

    def memory(self) -> StateMemory:
        """Return the bytes that states and buffers take, by place."""
        moving = [c for c in self.chunks if not c.resident]
        disk_bytes = sum(chunk_state_bytes(c.family, c.plan) for c in moving)
        logical = sum(chunk_state_bytes(c.family, c.plan) for c in self.chunks)
        return StateMemory(
            logical_bytes=logical,
            ram_bytes=logical - disk_bytes,
            disk_bytes=disk_bytes,
            file_bytes=self._copies * sum(c.file_bytes for c in self.chunks),
            ring_bytes=self._ring.plan.nbytes,
        )

    def views(self, parameter: int) -> dict[str, torch.Tensor]:
        """Return the states of a parameter that is wholly in RAM as 1-D views; else nothing."""
        names = self.families[parameter].states
        return dict(zip(names, self._views.get(parameter, ()), strict=False))

    def read(self, parameters: Iterable[int]) -> dict[int, dict[str, torch.Tensor]]:
        """Return copies of the states of ``parameters`` as 1-D fp32 tensors by name."""
        out = {
            p: {
                name: torch.zeros(self.sizes[p], dtype=torch.float32, device="cpu")
                for name in self.families[p].states
            }
            for p in parameters
        }
        for piece in self.pieces(out):
            for name, values in piece.states.items():
                out[piece.parameter][name][piece.start : piece.start + len(values)] = values
        return out

    def pieces(self, parameters: Iterable[int]) -> Generator[StateSlice, None, None]:
        """Yield the states of ``parameters`` in pieces, all from the same time, in any order.

        Memory is bounded: one slot of the ring, and the fp32 states of a part of a chunk. No step
        begins until the generator is exhausted or closed.
        """
        wanted = set(parameters)
        with self.pipeline.lock:
            self.pipeline.before_reading()
            self.pipeline.wait_idle()
            # No slot is in use by now, so the first one can take the chunks that are read.
            reseeded = {p for p in wanted if _is_reseeded(self, p)}
            chunks = [c for c in self.chunks if not wanted.isdisjoint(c.owners)]
            for chunk, streams in self._transfers.in_memory(chunks, self._ring):
                for part, part_streams in slices(chunk, streams):
                    states = unpack(part, part_streams, self.weights)
                    for run in part.plan.runs:
                        if run.parameter in wanted:
                            weight = self.weights if run.parameter in reseeded else None
                            yield _slice_of(run, states, weight)

    def put(self, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Set the states of the parameters of ``states`` (any shape, cast to fp32).

        States that are not named become zero, and masters the weight. A failure during the change
        poisons the store.
        """
        with self.pipeline.lock:
            self.pipeline.before_reading()
            self.pipeline.wait_idle()
            for chunk in self.chunks:
                named = [p for p in chunk.owners if p in states]
                blank = self.pipeline.stored.state(chunk) == "blank"
                # States that are not named become zero, which those of a blank chunk are.
                if not named or (blank and not any(states[p] for p in named)):
                    continue
                with poisoning(self.pipeline):
                    for _, streams in self._transfers.in_memory([chunk], self._ring):
                        for part, part_streams in slices(chunk, streams):
                            _set(part, part_streams, states, self.weights)
                        self._transfers.keep(chunk, self._ring, streams)
            for number in states:
                if (family := self.families[number]).has_master:
                    native, master = self.pipeline.handle.live(), states[number].get("master")
                    if master is None:
                        native.forget_weight(number)  # the next update seeds it from the parameter
                    else:
                        # The master stays if the next update finds this weight (ADR 0009).
                        weight = master.detach().reshape(-1).to("cpu", family.dtype)
                        native.record_weight(number, weight.data_ptr())

    def edit(
        self, parameters: AbstractSet[int], change: Callable[[Chunk, Sequence[torch.Tensor]], bool]
    ) -> None:
        """Pass the streams of each chunk that has ``parameters`` to ``change``.

        It returns whether it wrote to them. A failure poisons the store.
        """
        with self.pipeline.lock:
            self.pipeline.before_reading()
            self.pipeline.wait_idle()
            for chunk in self.chunks:
                if parameters.isdisjoint(chunk.owners):
                    continue
                with poisoning(self.pipeline):
                    for _, streams in self._transfers.in_memory([chunk], self._ring):
                        if change(chunk, streams):
                            self._transfers.keep(chunk, self._ring, streams)

    @property
    def engine(self) -> _native.Engine | None:
        """The I/O engine. Tests inject faults into it."""
        return self.storage.engine

    def leave(self) -> ChunkStorage:
        """Drop all states and buffers; return the disk space for another store."""
        with self.pipeline.lock:
            # The storage goes to the caller open, so it is not released.
            self._finalizer.detach()
            self.pipeline.close()
            self.abandon()
            self.chunks, self._views = [], {}
            self._ring = ChunkRing(RingPlan(0, 0))
            return self.storage

    def close(self) -> None:
        """Drop all states, buffers and files. Idempotent."""
        with self.pipeline.lock:
            self.pipeline.close()
            self._finalizer()
            # After `keep` the finalizer is detached and does nothing.
            resources = _KEPT.pop(id(self.pipeline.handle.resources), None)
            if resources is not None:
                _release(*resources)
            self.chunks, self._views = [], {}
            self._ring = ChunkRing(RingPlan(0, 0))


def _is_reseeded(store: StateStore, parameter: int) -> bool:
    """Return whether the weight is the master, because the user changed the weight."""
    family = store.families[parameter]
    # With FP32 the master is stored whole, and can be read whatever the weight is.
    if family.format == StateFormat.FP32 or not family.has_master:
        return False
    weight = store.weights(parameter).detach().reshape(-1)
    return not store.pipeline.handle.live().unchanged(parameter, weight.data_ptr())


def _set(
    part: Chunk,
    streams: Sequence[torch.Tensor],
    states: Mapping[int, Mapping[str, torch.Tensor]],
    weights: Weights,
) -> None:
    """Set the states of a part of a chunk; those that are not named become zero."""
    named = unpack(part, streams, weights)
    weight = gather_weight(part, weights)
    for run in part.plan.runs:
        if run.parameter not in states:
            continue
        new = states[run.parameter]
        source = slice(run.start, run.start + run.count)
        target = slice(run.position, run.position + run.count)
        if "master" in new and part.family.has_master:
            # The assignment rounds the master to the weight that it represents.
            weight[target] = new["master"].detach().reshape(-1)[source]
        for name, state in named.items():
            if name in new:
                state[target] = new[name].detach().reshape(-1)[source]
            elif name == "master":
                state[target] = weight[target]
            else:
                state[target] = 0
    pack(part, streams, named, weight)


def _slice_of(
    run: Segment, states: Mapping[str, torch.Tensor], weights: Weights | None
) -> StateSlice:
    """Return the states of a segment; ``weights``: its master is the weight."""
    named = {name: s[run.position : run.position + run.count] for name, s in states.items()}
    if weights is not None:
        weight = weights(run.parameter).detach().reshape(-1)
        named["master"] = weight[run.start : run.start + run.count].float()
    return StateSlice(run.parameter, run.start, named)


_KEPT: dict[int, tuple[Any, ...]] = {}
"""Resources of stores after ``keep``; the stores themselves may be collected."""


def _release(resources: Resources, storage: ChunkStorage, owner: int) -> None:
    """Free in this order: the pipeline drains into the files, then they are closed."""
    if owner == os.getpid():  # a forked child has neither the threads nor a right to the files
        resources.close()
        storage.close()
