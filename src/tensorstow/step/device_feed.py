"""Copies gradients on a device to the host by chunk, for updates there, and new weights back.

[Note: By chunk] What crosses the link at once is what one chunk of states needs: the pieces of its
parameters' gradients, into one slot of pinned staging memory, when the chunk awaits no more
gradients. So no slot waits for a gradient that is still to come, two slots are enough for any
model, and a large parameter's first piece is updated while its last is on the way. When a chunk is
updated its slot is free again, and its new weights are copied up from host memory.

    gradients final -> d2h (a copy down) -> updating (the pipeline's) -> h2d (a copy up)
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch

from tensorstow.io.device_link import DeviceEvent, DeviceLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import Segment
from tensorstow.states.memory import StagingPlan, plan_staging
from tensorstow.states.native_pipeline import UpdatePipeline
from tensorstow.step.chunk_gate import ChunkGate
from tensorstow.step.gradient_feed import GradientFeed
from tensorstow.step.host_weight import HostWeight
from tensorstow.step.managed_param import ManagedParam, StepPlan
from tensorstow.tensors.dtensor import flat, has_offloaded_gradient


@dataclass(eq=False, slots=True)
class _ChunkTransfer:
    """The parts of one chunk that are copied over the link."""

    chunk: int
    runs: tuple[Segment, ...]
    """Of parameters on the device."""


@dataclass(eq=False, slots=True)
class _Gradient:
    """A gradient that is still to be copied or read."""

    flat: torch.Tensor
    made: DeviceEvent | None
    """None: it is in host memory, and read where it is."""
    copies_left: int


@dataclass(eq=False, slots=True)
class _ChunkInFlight:
    """A chunk whose gradients are being copied or read."""

    transfer: _ChunkTransfer
    slot: int
    pieces: list[tuple[int, torch.Tensor | None]]
    """Parameter and gradient in host memory of each piece that the step expects."""
    copied: DeviceEvent


class _Stage(Enum):
    """How far a step is."""

    OVER = "nothing is under way"
    OPEN = "gradients may come"
    CLOSED = "all gradients are final, and some were not handed over"
    SENT = "some weights have not been copied to the device"
    FAILED = "the step failed half way"


class DeviceFeed(GradientFeed):
    """One optimizer's copies over the link, a step at a time.

    Used by the stepping thread alone; every call starts all copies that can start.
    """

    def __init__(
        self,
        link: DeviceLink,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        host_weights: Mapping[int, HostWeight],
    ) -> None:
        """Serve the parameters of ``host_weights``, by number; take the staging memory."""
        self.link = link
        self._pipeline = pipeline
        self._report_sent: Callable[[], None] = lambda: None
        self._host_weights = host_weights
        self._transfers: dict[int, _ChunkTransfer] = {}
        self._of: dict[int, list[_ChunkTransfer]] = {}
        self.serve(chunks)
        elements = [c.plan.elements for c in chunks if c.number in self._transfers]
        self.plan: StagingPlan = plan_staging(elements)
        self.staging = PinnedBlock(self.plan.nbytes, link.device, link.synchronize)
        self._free = list(range(self.plan.slots))
        self._expected: set[int] = set()
        self._gradients: dict[int, _Gradient] = {}
        self._targets: dict[int, torch.Tensor] = {}
        """Targets of new weights: the memory that the step began with, kept alive."""
        self._pending: set[int] = set()
        self._ready: deque[_ChunkTransfer] = deque()
        self._d2h: deque[_ChunkInFlight] = deque()
        self._updating: deque[_ChunkInFlight] = deque()
        self._h2d: DeviceEvent | None = None
        self._caught_up = False
        self._stage = _Stage.OVER

    def serve(self, chunks: Iterable[Chunk]) -> None:
        """Serve ``chunks``, a subset of those at creation; called between steps."""
        self._transfers.clear()
        self._of.clear()
        for chunk in chunks:
            runs = tuple(run for run in chunk.plan.runs if run.parameter in self._host_weights)
            if runs:
                transfer = self._transfers[chunk.number] = _ChunkTransfer(chunk.number, runs)
                for run in runs:
                    self._of.setdefault(run.parameter, []).append(transfer)

    # --- a step ---

    def begin(self, plan: StepPlan, gate: ChunkGate) -> None:
        """Begin a step, which the pipeline has begun, with the gradients that ``plan`` has."""
        del gate  # its owner calls ``send``
        # What went up of the last step is over before its host weights change: the gradients behind
        # which they do so come down behind the caller's stream, which has waited for it.
        self._h2d = None
        self._caught_up = False
        updates = [u for u in plan.updates if u.param.number in self._host_weights]
        self._expected = {update.param.number for update in updates}
        self._gradients.clear()
        self._targets = {n: flat(self._host_weights[n].parameter) for n in self._expected}
        self._pending.clear()
        self._stage = _Stage.OPEN
        made = self.link.record_event() if updates else None
        for update in updates:
            if update.gradient is not None:
                on_host = has_offloaded_gradient(update.param.owner)
                self._hold(update.param.number, update.gradient, None if on_host else made)

    def offer(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Take a parameter's contiguous gradient, which the caller's stream computes."""
        self._hold(param.number, gradient, self.link.record_event())

    def _hold(self, number: int, gradient: torch.Tensor, made: DeviceEvent | None) -> None:
        """Keep a gradient, complete after ``made``; None: it is complete in host memory."""
        transfers = self._of.get(number, [])
        if made is None and not self._caught_up:
            self.link.record_event().synchronize()  # what went up of the last step: see ``begin``
            self._caught_up = True
        if transfers:
            self._gradients[number] = _Gradient(flat(gradient), made, len(transfers))
        self._pending.update(transfer.chunk for transfer in transfers)

    def send(self, chunk: int) -> None:
        """Copy a complete chunk's gradients to the host when a slot is free."""
        if chunk in self._pending:
            self._ready.append(self._transfers[chunk])

    def close(self, sent: Callable[[], None]) -> None:
        """End the gradients; copy the rest in the pipeline's order."""
        self._report_sent = sent
        rank = {chunk: i for i, chunk in enumerate(self._pipeline.order_now())}
        under_way = {flight.transfer.chunk for flight in (*self._d2h, *self._updating)}
        rest = [self._transfers[chunk] for chunk in self._pending - under_way]
        self._ready = deque(sorted(rest, key=lambda transfer: rank[transfer.chunk]))
        self._stage = _Stage.CLOSED
        self.move_on()

    @property
    def is_over(self) -> bool:
        """Return whether copies of all new weights to the device have started."""
        return self._stage == _Stage.OVER

    def wait_for_one(self) -> None:
        """Return when one thing more can be done, or a chunk can be acquired."""
        with self._poisoning():
            self._wait()

    def needs(self, number: int) -> bool:
        """Return whether the gradient of a parameter is still to be copied or read."""
        return number in self._gradients

    def move_on(self) -> None:
        """Start all work that can start without waiting."""
        if self._stage != _Stage.FAILED:
            with self._poisoning():
                self._move_on()

    def wait(self, numbers: Collection[int] | None = None) -> None:
        """Return when these parameters, or all, have their new weights for the caller's stream.

        Parameters in host memory may be named too: a chunk can hold parts of them beside parts of
        parameters on the device, and any chunk may wait for buffers that those hold, so the copies
        go on until these parameters are updated. Raises what failed in the pipeline. Before
        ``close``, which is what makes a step take an end, and outside of one nothing is waited for.
        """
        if self._stage in {_Stage.OPEN, _Stage.FAILED}:
            return
        asked = list(self._of if numbers is None else numbers)
        wanted = {transfer.chunk for n in asked for transfer in self._of.get(n, [])}
        on_host = [n for n in asked if n not in self._of]
        with self._poisoning():
            self._move_on()
            while not wanted.isdisjoint(self._pending) or (
                self._pending and not all(map(self._pipeline.is_published, on_host))
            ):
                self._wait()
                self._move_on()
        self.join()
        if self._stage == _Stage.OVER:
            self._targets.clear()  # their memory is next used behind the copies to the device

    @property
    def staging_bytes(self) -> int:
        """Return the pinned memory that gradients pass through."""
        return self.plan.nbytes

    def join(self) -> None:
        """Make the caller's stream wait for the copies of new weights to the device.

        Repeated on each call: an earlier wait may have been in another stream.
        """
        copied = self._h2d
        if copied is not None:
            self.link.join(copied)

    # --- inside ---

    def _move_on(self) -> None:
        while self._d2h and self._d2h[0].copied.query():
            flight = self._d2h.popleft()
            self._pipeline.add_chunk_gradients(flight.transfer.chunk, flight.pieces)
            self._free_gradients(flight, updated=False)  # the device's copy is not needed any more
            self._updating.append(flight)
        while self._updating and self._pipeline.is_updated(self._updating[0].transfer.chunk):
            self._start_h2d()
        while self._ready and self._free:
            self._start_d2h(self._ready.popleft())
        if self._stage == _Stage.CLOSED and not (self._ready or self._d2h):
            self._report_sent()
            self._stage = _Stage.SENT
        if self._stage == _Stage.SENT and not self._pending:
            self._stage = _Stage.OVER

    def _wait(self) -> None:
        """Return when one thing more can be done."""
        if self._d2h:
            self._d2h[0].copied.synchronize()
        else:
            self._pipeline.wait_chunk(self._updating[0].transfer.chunk)

    def _start_d2h(self, transfer: _ChunkTransfer) -> None:
        """Copy a chunk's gradients to the host."""
        slot = self._free.pop()
        pairs = []
        pieces: list[tuple[int, torch.Tensor | None]] = []
        events = {}
        for run in transfer.runs:
            if run.parameter not in self._expected:
                continue
            gradient = self._gradients.get(run.parameter)
            if gradient is None:  # it never came
                pieces.append((run.parameter, None))
                continue
            source = gradient.flat[run.start : run.start + run.count]
            if gradient.made is None:
                pieces.append((run.parameter, source))
                continue
            at = self.plan.offset(slot, run.position)
            target = self.staging.tensor(at, run.count, source.dtype)
            pairs.append((target, source))
            pieces.append((run.parameter, target))
            events[id(gradient.made)] = gradient.made
        self._d2h.append(
            _ChunkInFlight(transfer, slot, pieces, self.link.d2h(pairs, events.values()))
        )

    def _free_gradients(self, flight: _ChunkInFlight, *, updated: bool) -> None:
        """Free gradients that were copied or, if ``updated``, read by the update."""
        for number, piece in flight.pieces:
            gradient = self._gradients.get(number)
            if piece is None or gradient is None or (gradient.made is None) != updated:
                continue
            gradient.copies_left -= 1
            if gradient.copies_left == 0:
                del self._gradients[number]

    def _start_h2d(self) -> None:
        """Copy a chunk's new weights to the device; free its slot."""
        flight = self._updating.popleft()
        self._free_gradients(flight, updated=True)
        updated = {number for number, gradient in flight.pieces if gradient is not None}
        pairs = []
        for run in flight.transfer.runs:
            if run.parameter in updated:
                host_weight = self._host_weights[run.parameter]
                piece = slice(run.start, run.start + run.count)
                pairs.append((self._targets[run.parameter][piece], flat(host_weight.host)[piece]))
        self._h2d = self.link.h2d(pairs)
        self._free.append(flight.slot)
        self._pending.discard(flight.transfer.chunk)

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Poison the pipeline on any error: the step is half taken."""
        try:
            yield
        except BaseException as error:
            self._stage = _Stage.FAILED
            self._pipeline.poison(error)
            raise
