"""Copies gradients on a device to the host by chunk, for updates on it, and new weights back.

[Note: By chunk] What crosses the link at once is what one chunk of states needs: the pieces of its
parameters' gradients, into one slot of pinned staging memory, when the chunk awaits no more
gradients. So no slot waits for a gradient that is still to come, two slots are enough for any
model, and a large parameter's first piece is updated while its last is on the way. When a chunk is
updated its slot is free again, and its new weights are copied up from host memory.

    gradients final -> d2h (a copy down) -> updating (the pipeline's) -> h2d (a copy up)
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tensorstow.io.device_link import COMPLETE, CopyQueue, DeviceEvent, DeviceLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import Segment
from tensorstow.states.memory import StagingPlan, plan_staging
from tensorstow.states.native_pipeline import UpdatePipeline
from tensorstow.step.host_weight import HostWeight
from tensorstow.step.link_feed import FeedStage, LinkFeed, is_on_host, part_of
from tensorstow.step.managed_param import ManagedParam, StepPlan
from tensorstow.tensors.dtensor import flat


@dataclass(eq=False, slots=True)
class _ChunkInFlight:
    """A chunk whose gradients are being copied or read."""

    chunk: Chunk
    slot: int
    pieces: list[tuple[int, torch.Tensor | None]]
    """Parameter and gradient in host memory of each piece that the step expects."""


class DeviceFeed(LinkFeed):
    """One optimizer's copies of gradients and new weights, for the chunks that the host updates."""

    def __init__(
        self,
        link: DeviceLink,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        host_weights: Mapping[int, HostWeight],
    ) -> None:
        """Serve the parameters of ``host_weights``, by number; take the staging memory."""
        super().__init__(link, pipeline, chunks, host_weights)
        self.plan: StagingPlan = plan_staging([c.plan.elements for c in self._chunks.values()])
        self.staging_bytes = self.plan.nbytes
        self.staging = PinnedBlock(self.plan.nbytes, link.device, link.synchronize)
        self._free = list(range(self.plan.slots))
        self._uploads = True
        self._d2h: CopyQueue[_ChunkInFlight] = CopyQueue()
        self._updating: deque[_ChunkInFlight] = deque()
        self._h2d: DeviceEvent | None = None
        # Whether the last step's copies to the device are over, so that host weights may change.
        self._caught_up = False

    # --- a step ---

    def offer(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Take a parameter's contiguous gradient, which the caller's stream computes, or has."""
        if is_on_host(gradient, param):
            self._caught_up = True  # what used the weight before is over: it made the gradient
        super().offer(param, gradient)

    @property
    def oldest_copy(self) -> DeviceEvent | None:
        """Return the event of the oldest gradients that are copied down."""
        return self._d2h.oldest

    def wait(self, numbers: Collection[int] | None = None) -> None:
        """Return when these parameters, or all, have their new weights for the caller's stream.

        ``numbers`` may have parameters in host memory too: a chunk can hold parts of both kinds,
        and any chunk may wait for buffers that such chunks hold. So the copies go on until these
        parameters are updated. Raises the pipeline's error. Before ``close``, without which a step
        cannot end, and outside of a step, this returns at once.
        """
        if self._stage in {FeedStage.OPEN, FeedStage.FAILED}:
            return
        asked = list(self._chunks_of if numbers is None else numbers)
        wanted = {chunk for n in asked for chunk in self._chunks_of.get(n, [])}
        on_host = [n for n in asked if n not in self._chunks_of]
        self.move_on()
        while not wanted.isdisjoint(self._unfinished) or (
            self._unfinished and not all(map(self._pipeline.is_published, on_host))
        ):
            self.wait_for_one()
            self.move_on()
        self.join()
        if self.is_over:
            self._weights.clear()  # their memory is next used after the copies to the device

    def join(self) -> None:
        """Make the caller's stream wait for the copies of new weights to the device.

        Repeated on each call: an earlier wait may have been in another stream.
        """
        copied = self._h2d
        if copied is not None:
            self.link.join(copied)

    def pass_on(self) -> None:
        """Pass on what can be before an undoable step is closed; wait for gradients.

        A chunk whose states stay in memory keeps its slot until the step is confirmed.
        """
        with self._failing():
            self._move_on()
            while self._ready or self._d2h:
                moving = [flight for flight in self._updating if not flight.chunk.resident]
                if self._d2h:
                    self._update(self._d2h.pop())
                elif moving:
                    # Index 0 is the oldest chunk, and -1 the newest.
                    self._pipeline.wait_chunk(moving[-self.newest_first].chunk.number)
                else:
                    return
                self._move_on()

    def undo(self) -> None:
        """Forget the open step, and take its slots back."""
        # ``pop`` waits: a slot may be used again only when the copy into it is over.
        while self._d2h:
            self._updating.append(self._d2h.pop())
        self._free += [flight.slot for flight in self._updating]
        self._updating.clear()
        super().undo()

    # --- inside ---

    def _begin(self, plan: StepPlan) -> None:
        # The last step's copies to the device end before its host weights change: those change
        # after gradients are copied down, and these copies wait for the caller's stream.
        self._h2d = None
        self._caught_up = False
        self._uploads = plan.uploads

    def _hold(self, number: int, gradient: torch.Tensor, computed: DeviceEvent | None) -> None:
        if computed is None and not self._caught_up:
            self.link.record_event().synchronize()  # the last step's copies: see ``_begin``
            self._caught_up = True
        super()._hold(number, gradient, computed)

    def _move_on(self) -> None:
        # What ends comes first: it frees slots for the copies that begin.
        for flight in self._d2h.pop_complete():
            self._update(flight)
        for flight in self._take_updated():
            self._start_h2d(flight)
        while self._ready and self._free:
            self._start_d2h(self._chunks[self._next_ready()])
        self._report_progress(all_sent=not (self._ready or self._d2h))

    def _next_ready(self) -> int:
        """Return the chunk to send next, and take it out.

        Copies are in one stream, and one of a gradient that the device has yet to compute holds
        up all that follow. So the newest are the newest that are computed. They are computed in
        the order of ``_ready``.
        """
        computed = 0
        if self.newest_first:
            computed = bisect_left(self._ready, 1, key=lambda n: 1 - self._is_computed(n))
        number = self._ready[computed - 1] if computed else self._ready[0]
        self._ready.remove(number)
        return number

    def _is_computed(self, chunk: int) -> bool:
        gradients = map(self._gradients.get, self._chunks[chunk].owners)
        events = (gradient.computed for gradient in gradients if gradient is not None)
        return all(event is None or event.query() for event in events)

    def _wait_for_one(self) -> None:
        if self._d2h:
            self._update(self._d2h.pop())
        else:
            # Index 0 is the oldest chunk, and -1 the newest.
            self._pipeline.wait_chunk(self._updating[-self.newest_first].chunk.number)

    def _update(self, flight: _ChunkInFlight) -> None:
        """Pass a chunk's gradients, which are in host memory, to the pipeline."""
        self._pipeline.add_chunk_gradients(flight.chunk.number, flight.pieces)
        self._free_gradients(flight, updated=False)  # the device's copy is not needed any more
        self._updating.append(flight)

    def _runs(self, chunk: Chunk) -> list[Segment]:
        """Return the chunk's segments of parameters on the device that the step expects."""
        return [run for run in chunk.plan.runs if run.parameter in self._weights]

    def _start_d2h(self, chunk: Chunk) -> None:
        """Copy a chunk's gradients to the host."""
        self._unsent.discard(chunk.number)
        slot = self._free.pop()
        pairs = []
        pieces: list[tuple[int, torch.Tensor | None]] = []
        events = {}
        for run in self._runs(chunk):
            gradient = self._gradients.get(run.parameter)
            if gradient is None:  # it never came
                pieces.append((run.parameter, None))
                continue
            source = gradient.part(run)
            # A gradient in host memory is read where it is, and passes no slot.
            if gradient.computed is None:
                pieces.append((run.parameter, source))
                continue
            at = self.plan.offset(slot, run.position)
            target = self.staging.tensor(at, run.count, source.dtype)
            pairs.append((target, source))
            pieces.append((run.parameter, target))
            # Gradients that a step begins with share one event.
            events[id(gradient.computed)] = gradient.computed
        # An event of no copy would still wait for those before it.
        copied = self.link.d2h(pairs, events.values()) if pairs else COMPLETE
        self._d2h.add(_ChunkInFlight(chunk, slot, pieces), copied)

    def _free_gradients(self, flight: _ChunkInFlight, *, updated: bool) -> None:
        """Free gradients that were copied or, if ``updated``, read by the update."""
        for number, piece in flight.pieces:
            gradient = self._gradients.get(number)
            if piece is None or gradient is None:
                continue
            # The update itself reads a gradient in host memory; one on the device is copied before.
            if (gradient.computed is None) == updated:
                self._drop_gradient(number)

    def _take_updated(self) -> Iterator[_ChunkInFlight]:
        """Return the chunks that are updated, and take them out."""
        if self.newest_first:  # the oldest may be the last to be updated
            updated = [f for f in self._updating if self._pipeline.is_updated(f.chunk.number)]
            for flight in updated:
                self._updating.remove(flight)
                yield flight
            return
        while self._updating and self._pipeline.is_updated(self._updating[0].chunk.number):
            yield self._updating.popleft()

    def _start_h2d(self, flight: _ChunkInFlight) -> None:
        """Copy a chunk's new weights to the device; free its slot."""
        self._free_gradients(flight, updated=True)
        updated = {number for number, gradient in flight.pieces if gradient is not None}
        pairs = []
        for run in self._runs(flight.chunk) if self._uploads else ():
            if run.parameter in updated:
                host = flat(self._host_weights[run.parameter].host)
                pairs.append((part_of(self._weights[run.parameter], run), part_of(host, run)))
        # Copies to the device are in one stream: the newest event is after all of them.
        self._h2d = self.link.h2d(pairs)
        # The slot held gradients: the copy of new weights reads the host weights.
        self._free.append(flight.slot)
        self._unfinished.discard(flight.chunk.number)
