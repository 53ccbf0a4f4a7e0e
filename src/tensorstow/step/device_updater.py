"""Updates chunks on the accelerator: copies states up, updates them, copies them down.

[Note: Through the device] The pipeline reads, verifies and writes as for a host update. The updater
acquires each chunk whose states are in memory, and the native kernel does not run. Gradients and
weights stay on the device. Three slots of device memory are enough for any model: one chunk is
copied to the device while another is updated and a third is copied back. The fused kernel or the
reference ([Note: Two rules]) runs on a stream of its own, after the work that computes the
gradients, so that the caller's stream goes on with backward. A step ends when the last states are
back in host memory; all weights are then new for any stream. The kernel on the host updates the
other chunks of the step, if any ([Note: Both at once]).

    acquired -> copied to the device -> updated -> copied to the host -> released

16-bit weights are copied to the host too, because writes by others are detected by comparing the
two copies. Weights of fp32 parameters are copied for a commit only; otherwise their host weights
become stale, as if the user had written the parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tensorstow.base.errors import StowError
from tensorstow.formats.reference import AdamScalars
from tensorstow.io.device_link import CopyQueue, DeviceEvent, DeviceLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import Segment, parts_of
from tensorstow.states.memory import MOST_DEVICE_SLOTS, device_slots
from tensorstow.states.native_pipeline import StepRow, UpdatePipeline
from tensorstow.step.host_weight import HostWeight
from tensorstow.step.link_feed import LinkFeed, part_of
from tensorstow.step.managed_param import StepPlan
from tensorstow.step.segment_update import SegmentUpdate
from tensorstow.step.update_rule import rule_on
from tensorstow.tensors.dtensor import flat

_MOST_AHEAD = MOST_DEVICE_SLOTS
"""Chunks that the pipeline is to read beyond those in slots."""
StreamsOf = Callable[[Chunk, int], Sequence[torch.Tensor]]
"""The streams of a chunk in a slot of the ring, or (-1) in memory of its own."""


@dataclass(eq=False, slots=True)
class _ChunkOnDevice:
    """A chunk that is copied or updated."""

    chunk: int
    parameters: Sequence[int]
    """Numbers of the parameters that it updates."""
    slot: int
    host: Sequence[torch.Tensor]
    """Its states in host memory, which must live until they are copied back."""


class DeviceUpdater(LinkFeed):
    """One optimizer's updates on an accelerator, for the chunks that the device updates."""

    updates_chunks = True

    def __init__(
        self,
        link: DeviceLink,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        host_weights: Mapping[int, HostWeight],
        streams_of: StreamsOf,
    ) -> None:
        """Serve ``chunks``, all of whose parameters ``host_weights`` has; take device memory."""
        super().__init__(link, pipeline, chunks, host_weights)
        self._streams_of = streams_of
        families = {chunk.family for chunk in chunks}
        self._rules = {family: rule_on(link.device, family).rule for family in families}
        tables = [self._table_bytes(chunk) for chunk in chunks]
        slots, self._states_end = device_slots([(c.family, c.plan.elements) for c in chunks])
        self._table_room = max(tables, default=0)
        self._free = list(range(slots))
        self._slots: list[torch.Tensor] = []
        self.take_slots()
        self.tables = PinnedBlock(
            len(self._slots) * self._table_room, link.device, link.synchronize
        )
        """Host memory that the slots' tables are copied from, if the rule has any."""
        self._rows: Sequence[StepRow] = ()
        self._scalars: Sequence[AdamScalars] = ()
        self._all_weights = False
        """Whether fp32 weights are copied to host memory too."""
        self._ahead = 0
        """Chunks whose gradients the pipeline has, and that were not acquired yet."""
        self._in_flight: CopyQueue[_ChunkOnDevice] = CopyQueue()

    def take_slots(self) -> None:
        """Allocate the slots' memory, unless it is there."""
        nbytes, device = self._states_end + self._table_room, self.link.device
        if not self._slots:
            self._slots = [
                torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in self._free
            ]
            self._made = self.link.record_event()
            """The event after earlier uses of the slots' memory."""
        self.device_bytes = sum(slot.nbytes for slot in self._slots)

    def free_slots(self) -> None:
        """Free the slots' memory, which no copy and no update may use."""
        self._slots, self.device_bytes = [], 0

    # --- a step ---

    @property
    def oldest_copy(self) -> DeviceEvent | None:
        """Return the event of the oldest states that are copied back."""
        return self._in_flight.oldest

    # --- inside ---

    def _begin(self, plan: StepPlan) -> None:
        self._rows, self._all_weights = plan.rows, plan.commits
        self._scalars = plan.scalars

    def _move_on(self) -> None:
        for flight in self._in_flight.pop_complete():
            self._release(flight)
        self._add_gradients()
        while self._free:
            acquired = self._pipeline.caller_chunks.acquire(wait=False)
            if acquired is None:
                break
            self._start_acquired(*acquired)
        self._report_progress(all_sent=not self._ready)
        if self.is_over:
            self._rows, self._weights = (), {}  # frees device memory

    def _wait_for_one(self) -> None:
        """Release the oldest chunk in flight; if there is none, start one.

        The pipeline may need the memory of a chunk in flight: it is not waited for meanwhile.
        """
        if self._in_flight:
            self._release(self._in_flight.pop())
            return
        acquired = self._pipeline.caller_chunks.acquire(wait=True)
        if acquired is None:
            self._pipeline.wait_published()
            message = "A step was over before all of its chunks were updated."
            raise StowError(message)
        self._start_acquired(*acquired)

    def _add_gradients(self) -> None:
        """Pass ready chunks to the pipeline a few at a time: it reads them in this order."""
        while self._ready and self._ahead < _MOST_AHEAD:
            chunk = self._chunks[self._ready.popleft()]
            self._unsent.discard(chunk.number)
            held = {n: self._gradients.get(n) for n in chunk.owners if n in self._weights}
            pieces = [(n, None if g is None else g.flat) for n, g in held.items()]
            self._pipeline.add_chunk_gradients(chunk.number, pieces)
            self._ahead += 1

    def _release(self, flight: _ChunkOnDevice) -> None:
        """Release a chunk whose states are back in host memory."""
        self._pipeline.caller_chunks.release(flight.chunk)
        self._free.append(flight.slot)
        for number in flight.parameters:
            self._drop_gradient(number)
        self._unfinished.discard(flight.chunk)

    def _start_acquired(self, number: int, ring_slot: int) -> None:
        self._ahead -= 1
        self._start(self._chunks[number], ring_slot)
        self._add_gradients()

    def _start(self, chunk: Chunk, ring_slot: int) -> None:
        """Copy a chunk's states to the device, update them, and copy them back."""
        slot = self._free.pop()
        host = self._streams_of(chunk, ring_slot)
        away = self._streams_in(slot, chunk)
        runs = [run for run in chunk.plan.runs if run.parameter in self._gradients]
        held = {run.parameter: self._gradients[run.parameter] for run in runs}
        segments = [self._segment(run) for run in runs]
        room = self._table_bytes(chunk)
        with self.link.update_stream():
            tables, update = self._rules[chunk.family].prepare(
                segments,
                chunk.family,
                self.tables.tensor(slot * self._table_room, room, torch.uint8),
                self._slots[slot][self._states_end :][:room],
            )
            # The update alone waits for gradients: states are copied up meanwhile.
            for computed in {id(g.computed): g.computed for g in held.values()}.values():
                if computed is not None:
                    self.link.join(computed)
            h2d_pairs = [*zip(away, host, strict=True), *tables]
            # Nothing uses a free slot any more, so the copy waits only for the slot's allocation.
            self.link.join(self.link.h2d(h2d_pairs, [self._made]))
            update(away)
            d2h_pairs = list(zip(host, away, strict=True))
            for run, segment in zip(runs, segments, strict=True):
                if self._all_weights or segment.weight.dtype != torch.float32:
                    host_weight = self._host_weights[run.parameter]
                    d2h_pairs.append((part_of(flat(host_weight.host), run), segment.weight))
            copied = self.link.d2h(d2h_pairs, [self.link.record_event()])
        self._in_flight.add(_ChunkOnDevice(chunk.number, list(held), slot, host), copied)

    def _segment(self, run: Segment) -> SegmentUpdate:
        row = self._rows[run.parameter]
        return SegmentUpdate(
            weight=part_of(self._weights[run.parameter], run),
            gradient=self._gradients[run.parameter].part(run),
            position=run.position,
            first=run.start,
            scalars=self._scalars[row.scalars],
            key=row.key,
            seed_master=row.seed_master,
        )

    def _table_bytes(self, chunk: Chunk) -> int:
        return self._rules[chunk.family].table_bytes(len(chunk.plan.runs))

    def _streams_in(self, slot: int, chunk: Chunk) -> list[torch.Tensor]:
        """Return the views of a slot that hold a chunk's streams."""
        elements = chunk.plan.elements
        return [
            self._slots[slot][part.file_at :][: spec.nbytes(elements)].view(spec.dtype)
            for part, spec in zip(
                parts_of(chunk.family, elements)[:-1], chunk.family.specs, strict=True
            )
        ]
