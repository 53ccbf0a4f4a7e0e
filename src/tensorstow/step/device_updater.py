"""Updates chunks on the accelerator: copies states up, updates them, copies them down.

[Note: Through the device] The pipeline reads, verifies and writes as for a host update. The updater
acquires each chunk whose states are in memory, and the native kernel does not run. Gradients and
weights stay on the device. Three slots of device memory are enough for any model: one chunk is
copied to the device while another is updated and a third is copied back. The fused kernel or the
reference ([Note: Two rules]) runs on a stream of its own, ordered behind the work that made the
gradients, so that the caller's stream goes on with backward. A step ends when the last states are
back in host memory; all weights are then new for any stream. The kernel on the host updates the
other chunks of the step, if any ([Note: Both at once]).

    acquired -> copied to the device -> updated -> copied to the host -> released

16-bit weights are copied to the host too, because writes by others are detected by comparing the
two copies. Weights of fp32 parameters are copied for a commit only; otherwise their host weights
become stale, as if the user had written the parameters.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tensorstow.base.errors import StowError
from tensorstow.formats.reference import AdamScalars
from tensorstow.io.device_link import DeviceEvent, DeviceLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import Segment, parts_of
from tensorstow.states.memory import MOST_DEVICE_SLOTS, device_slots
from tensorstow.states.native_pipeline import UpdatePipeline
from tensorstow.step.host_weight import HostWeight
from tensorstow.step.update_rule import SegmentUpdate, rule_on
from tensorstow.tensors.dtensor import flat

_MOST_AHEAD = MOST_DEVICE_SLOTS
"""Chunks that the pipeline is to read beyond those in slots."""
StreamsOf = Callable[[Chunk, int], Sequence[torch.Tensor]]
"""The streams of a chunk in a slot of the ring, or (-1) in memory of its own."""


@dataclass(frozen=True, slots=True)
class DeviceParamUpdate:
    """One parameter's update in one step."""

    gradient: torch.Tensor | None
    """1-D, on the device; None: it is still to come."""
    scalars: AdamScalars
    key: int
    """Of the random bits that inexact formats round with."""
    seed_master: bool


@dataclass(eq=False, slots=True)
class _FinalGradient:
    """A gradient that updates are to read, or read."""

    flat: torch.Tensor
    made: DeviceEvent
    chunks_left: int


@dataclass(eq=False, slots=True)
class _ChunkOnDevice:
    """A chunk that is copied or updated."""

    chunk: int
    parameters: Sequence[int]
    """Those that it updates, by number."""
    slot: int
    host: Sequence[torch.Tensor]
    """Its states in host memory, which must live until they are copied back."""
    copied: DeviceEvent


class DeviceUpdater:
    """One optimizer's updates on an accelerator; used by the stepping thread alone."""

    def __init__(
        self,
        link: DeviceLink,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        host_weights: Mapping[int, HostWeight],
        streams_of: StreamsOf,
    ) -> None:
        """Serve ``chunks``, all of whose parameters ``host_weights`` has; take device memory."""
        self.link = link
        self._pipeline = pipeline
        self._chunks: dict[int, Chunk] = {}
        self._chunks_of: dict[int, list[int]] = {}
        """Of each parameter."""
        self.serve(chunks)
        self._host_weights = host_weights
        self._streams_of = streams_of
        families = {chunk.family for chunk in chunks}
        self._rules = {family: rule_on(link.device, family).rule for family in families}
        tables = [self._table_bytes(chunk) for chunk in chunks]
        slots, self._states_end = device_slots([(c.family, c.plan.elements) for c in chunks])
        self._table_room = max(tables, default=0)
        self._slots = [
            torch.empty(self._states_end + self._table_room, dtype=torch.uint8, device=link.device)
            for _ in range(slots)
        ]
        self.tables = PinnedBlock(
            len(self._slots) * self._table_room, link.device, link.synchronize
        )
        """What the slots' tables are copied from, if the rule has any."""
        self._made = link.record_event()
        """Behind earlier uses of the slots' memory."""
        self._free = list(range(len(self._slots)))
        self._updates: Mapping[int, DeviceParamUpdate] = {}
        self._weights: dict[int, torch.Tensor] = {}
        """What the step writes: the memory that it began with, which it holds."""
        self._gradients: dict[int, _FinalGradient] = {}
        self._report_sent: Callable[[], None] = lambda: None
        self._all_weights = False
        self._pending: set[int] = set()
        """Chunks whose gradients the pipeline has not been given."""
        self._ready: deque[int] = deque()
        """Those of them whose gradients are all here."""
        self._ahead = 0
        """Chunks whose gradients the pipeline has, and that were not acquired yet."""
        self._is_open = False
        self._is_closed = True
        """No more gradients come."""
        self._in_flight: deque[_ChunkOnDevice] = deque()

    @property
    def device_bytes(self) -> int:
        """Return the device memory that states pass through."""
        return sum(slot.nbytes for slot in self._slots)

    def serve(self, chunks: Iterable[Chunk]) -> None:
        """Update ``chunks``, and no others of those it was made with, between steps."""
        self._chunks = {chunk.number: chunk for chunk in chunks}
        self._chunks_of = {}
        for chunk in self._chunks.values():
            for number in chunk.owners:
                self._chunks_of.setdefault(number, []).append(chunk.number)

    # --- a step ---

    def begin(self, updates: Mapping[int, DeviceParamUpdate], *, all_weights: bool) -> None:
        """Begin an open step of the pipeline, with the gradients that ``updates`` has.

        Args:
            updates: What the step does with each parameter whose gradient is there or may come.
            all_weights: fp32 weights are copied to host memory too.
        """
        self._updates, self._all_weights = updates, all_weights
        self._weights = {n: flat(self._host_weights[n].parameter) for n in updates}
        self._gradients.clear()
        self._pending.clear()
        self._ready.clear()
        self._ahead = 0
        self._is_open, self._is_closed = True, False
        made = self.link.record_event()
        for number, update in updates.items():
            if update.gradient is not None:
                self._hold(number, update.gradient, made)

    def offer(self, number: int, gradient: torch.Tensor) -> None:
        """Take the final gradient of a parameter, which the caller's stream computes."""
        self._hold(number, flat(gradient), self.link.record_event())

    def send(self, chunk: int) -> None:
        """Update a chunk as soon as can be: it awaits no more gradients."""
        if chunk in self._pending:
            self._ready.append(chunk)

    def close(self, sent: Callable[[], None]) -> None:
        """End the gradients; ``sent`` is called when the pipeline has been given all."""
        self._report_sent = sent
        self._is_closed = True
        self._ready = deque(n for n in self._pipeline.order_now() if n in self._pending)

    @property
    def is_over(self) -> bool:
        """Return whether all states are back in host memory."""
        return not (self._is_open or self._ahead or self._in_flight)

    @property
    def under_way(self) -> bool:
        """Return whether there is a chunk in flight that ``end_one`` can wait for."""
        return bool(self._in_flight)

    def move_on(self) -> None:
        """Start all work that can start without waiting."""
        while self._in_flight and self._in_flight[0].copied.query():
            self._release()
        self._add_gradients()
        while self._free:
            acquired = self._pipeline.caller_chunks.acquire(wait=False)
            if acquired is None:
                break
            self._start_acquired(*acquired)

    def end_one(self) -> None:
        """Wait for the oldest chunk in flight, and release it."""
        self._in_flight[0].copied.synchronize()
        self._release()

    def start_one(self) -> None:
        """Wait for a chunk and start it; raise the pipeline's error if it failed.

        No chunk may be in flight: the pipeline may need the memory that it holds.
        """
        acquired = self._pipeline.caller_chunks.acquire(wait=True)
        if acquired is None:
            self._pipeline.wait_published()
            message = "A step was over before all of its chunks were updated."
            raise StowError(message)
        self._start_acquired(*acquired)

    # --- inside ---

    def _hold(self, number: int, gradient: torch.Tensor, made: DeviceEvent) -> None:
        chunks = self._chunks_of.get(number, [])
        if chunks:
            self._gradients[number] = _FinalGradient(gradient, made, len(chunks))
        self._pending.update(chunks)

    def _add_gradients(self) -> None:
        """Give the pipeline ready chunks, a few at a time, as it reads those first."""
        while self._ready and self._ahead < _MOST_AHEAD:
            number = self._ready.popleft()
            self._pending.discard(number)
            owners = [n for n in self._chunks[number].owners if n in self._updates]
            held = [self._gradients.get(n) for n in owners]
            pieces = [(n, None if g is None else g.flat) for n, g in zip(owners, held, strict=True)]
            self._pipeline.add_chunk_gradients(number, pieces)
            self._ahead += 1
        if self._is_open and self._is_closed and not self._ready:
            self._is_open = False
            self._report_sent()

    def _release(self) -> None:
        """Release the oldest chunk in flight, whose states are back in host memory."""
        flight = self._in_flight.popleft()
        self._pipeline.caller_chunks.release(flight.chunk)
        self._free.append(flight.slot)
        for number in flight.parameters:
            gradient = self._gradients[number]
            gradient.chunks_left -= 1
            if gradient.chunks_left == 0:
                del self._gradients[number]
        if self.is_over:
            self._updates, self._weights = {}, {}  # which hold memory of the device

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
        segments = [self._segment(run, held[run.parameter].flat) for run in runs]
        room = self._table_bytes(chunk)
        with self.link.update_stream():
            tables, update = self._rules[chunk.family].prepare(
                segments,
                chunk.family,
                self.tables.tensor(slot * self._table_room, room, torch.uint8),
                self._slots[slot][self._states_end :][:room],
            )
            for made in {id(g.made): g.made for g in held.values()}.values():
                self.link.join(made)
            h2d_pairs = [*zip(away, host, strict=True), *tables]
            self.link.join(self.link.h2d(h2d_pairs, [self._made]))
            update(away)
            d2h_pairs = list(zip(host, away, strict=True))
            for run, segment in zip(runs, segments, strict=True):
                if self._all_weights or segment.weight.dtype != torch.float32:
                    host_weight = self._host_weights[run.parameter]
                    d2h_pairs.append((_part(flat(host_weight.host), run), segment.weight))
            copied = self.link.d2h(d2h_pairs, [self.link.record_event()])
        self._in_flight.append(_ChunkOnDevice(chunk.number, list(held), slot, host, copied))

    def _segment(self, run: Segment, gradient: torch.Tensor) -> SegmentUpdate:
        update = self._updates[run.parameter]
        return SegmentUpdate(
            weight=_part(self._weights[run.parameter], run),
            gradient=_part(gradient, run),
            position=run.position,
            first=run.start,
            scalars=update.scalars,
            key=update.key,
            seed_master=update.seed_master,
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


def _part(whole: torch.Tensor, run: Segment) -> torch.Tensor:
    return whole[run.start : run.start + run.count]
