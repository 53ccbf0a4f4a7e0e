"""The ferry: gradients of accelerator parameters go down to their chunk, new weights back up.

[Note: By chunk] What crosses the link at once is what one chunk of states needs: the pieces of its
parameters' gradients, into one slot of pinned staging memory, as soon as all of them are there. So
no slot ever waits for a gradient that is still to come, two slots are enough for any model, and a
large parameter's first piece is updated while its last is on the way. When a chunk is updated its
slot is free again, and its new weights go up from the mirrors.

    gradients there -> falling (a copy down) -> updating (the pipeline's) -> rising (a copy up)
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from tensorstow.step.closing import Closing
from tensorstow.step.host_weight import HostWeight, flat


@dataclass(eq=False, slots=True)
class _ChunkTransfer:
    """What crosses the link for one chunk."""

    chunk: int
    runs: tuple[Segment, ...]
    """Of parameters on the device."""
    awaited: int = 0
    """Gradients that are still to come in this step."""


@dataclass(eq=False, slots=True)
class _Gradient:
    """A gradient, while copies of it are to be made, or it is read."""

    flat: torch.Tensor
    made: DeviceEvent | None
    """None: it is in host memory, and read where it is."""
    copies_left: int


@dataclass(eq=False, slots=True)
class _ChunkInFlight:
    """A cargo under way."""

    transfer: _ChunkTransfer
    slot: int
    landing: list[tuple[int, torch.Tensor | None]]
    """Parameter and gradient in host memory of each piece that the step expects."""
    fallen: DeviceEvent


class _Stage(Enum):
    """How far a step is."""

    OVER = "nothing is under way"
    OPEN = "gradients may come"
    WHOLE = "all gradients are there, and some have not landed"
    LANDED = "some weights have not gone up"
    FAILED = "nobody may go on from here"


class DeviceFeed:
    """One optimizer's traffic over the link, a step at a time.

    It lives on the thread that steps: whatever it is asked moves everything on that can move.
    """

    def __init__(
        self,
        link: DeviceLink,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        host_weights: Mapping[int, HostWeight],
        closing: Closing | None = None,
    ) -> None:
        """Serve the parameters of ``host_weights``, by number; take the staging memory.

        ``closing`` is told when all gradients have landed; None: nobody else lands any.
        """
        self.link = link
        self._pipeline = pipeline
        self._closing = closing or Closing(pipeline, 1)
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
        """Where new weights go up to: the memory that the step began with, which it holds."""
        self._pending: set[int] = set()
        self._ready: deque[_ChunkTransfer] = deque()
        self._falling: deque[_ChunkInFlight] = deque()
        self._updating: deque[_ChunkInFlight] = deque()
        self._risen: DeviceEvent | None = None
        self._caught_up = False
        self._stage = _Stage.OVER

    def serve(self, chunks: Iterable[Chunk]) -> None:
        """Carry for ``chunks``, and for no others of those it was made with, between steps."""
        self._transfers.clear()
        self._of.clear()
        for chunk in chunks:
            runs = tuple(run for run in chunk.plan.runs if run.parameter in self._host_weights)
            if runs:
                transfer = self._transfers[chunk.number] = _ChunkTransfer(chunk.number, runs)
                for run in runs:
                    self._of.setdefault(run.parameter, []).append(transfer)

    # --- a step ---

    def open(self, numbers: Iterable[int]) -> None:
        """Begin a step, which the pipeline has begun, in which these parameters may get gradients.

        Numbers of parameters that are not on the device are passed over.
        """
        # What went up of the last step is over before its mirrors change: the gradients behind
        # which they do so come down behind the caller's stream, which has waited for it.
        self._risen = None
        self._caught_up = False
        self._expected = {n for n in numbers if n in self._host_weights}
        for transfer in self._transfers.values():
            transfer.awaited = sum(run.parameter in self._expected for run in transfer.runs)
        self._gradients.clear()
        self._targets = {n: flat(self._host_weights[n].parameter) for n in self._expected}
        self._pending.clear()
        self._stage = _Stage.OPEN

    def offer(self, number: int, gradient: torch.Tensor, made: DeviceEvent | None) -> None:
        """Take a parameter's contiguous gradient, which is complete behind ``made``.

        None: it has come down already, as a whole.
        """
        transfers = self._of.get(number, [])
        if made is None and not self._caught_up:
            self.link.record_event().synchronize()  # what went up of the last step: see ``open``
            self._caught_up = True
        if transfers:
            self._gradients[number] = _Gradient(flat(gradient), made, len(transfers))
        for transfer in transfers:
            self._pending.add(transfer.chunk)
            transfer.awaited -= 1
            if transfer.awaited == 0:
                self._ready.append(transfer)

    def end(self) -> None:
        """Say that no more gradients come, and begin with what the pipeline begins with."""
        rank = {chunk: i for i, chunk in enumerate(self._pipeline.order_now())}
        late = [self._transfers[c] for c in self._pending if self._transfers[c].awaited > 0]
        self._ready = deque(
            sorted([*self._ready, *late], key=lambda transfer: rank[transfer.chunk])
        )
        self._stage = _Stage.WHOLE
        self.move_on()

    @property
    def is_over(self) -> bool:
        """Return whether the step is: all new weights go up, or are up."""
        return self._stage == _Stage.OVER

    def wait_for_one(self) -> None:
        """Return when one thing more can be done, or a chunk is there to be updated outside."""
        with self._poisoning():
            self._wait()

    def needs(self, number: int) -> bool:
        """Return whether the gradient of a parameter must live on."""
        return number in self._gradients

    def move_on(self) -> None:
        """Do what can be done without waiting for anything."""
        if self._stage != _Stage.FAILED:
            with self._poisoning():
                self._move_on()

    def finish(self, numbers: Iterable[int] | None = None) -> None:
        """Return when these parameters, or all, have their new weights for the caller's stream.

        Parameters in host memory may be named too: a chunk can hold parts of them beside parts of
        parameters on the device, and any chunk may wait for buffers that those hold, so the copies
        go on until these parameters are updated. Raises what failed in the pipeline. Before
        ``end``, which is what makes a step take an end, and outside of one nothing is waited for.
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
            self._targets.clear()  # whoever gets the memory next gets it behind the copies up

    def join(self) -> None:
        """Let the caller's stream be behind the weights that have been sent up.

        Whoever waited for them before may have done so in another stream.
        """
        risen = self._risen
        if risen is not None:
            self.link.join(risen)

    # --- inside ---

    def _move_on(self) -> None:
        while self._falling and self._falling[0].fallen.query():
            self._land()
        while self._updating and self._pipeline.is_updated(self._updating[0].transfer.chunk):
            self._rise()
        while self._ready and self._free:
            self._fall(self._ready.popleft())
        if self._stage == _Stage.WHOLE and not (self._ready or self._falling):
            self._closing.landed()
            self._stage = _Stage.LANDED
        if self._stage == _Stage.LANDED and not self._pending:
            self._stage = _Stage.OVER

    def _wait(self) -> None:
        """Return when one thing more can be done."""
        if self._falling:
            self._falling[0].fallen.synchronize()
        else:
            self._pipeline.wait_chunk(self._updating[0].transfer.chunk)

    def _fall(self, transfer: _ChunkTransfer) -> None:
        """Send a chunk's gradients down."""
        slot = self._free.pop()
        pairs = []
        landing: list[tuple[int, torch.Tensor | None]] = []
        marks = {}
        for run in transfer.runs:
            if run.parameter not in self._expected:
                continue
            gradient = self._gradients.get(run.parameter)
            if gradient is None:  # it never came
                landing.append((run.parameter, None))
                continue
            source = gradient.flat[run.start : run.start + run.count]
            if gradient.made is None:
                landing.append((run.parameter, source))
                continue
            at = self.plan.offset(slot, run.position)
            target = self.staging.tensor(at, run.count, source.dtype)
            pairs.append((target, source))
            landing.append((run.parameter, target))
            marks[id(gradient.made)] = gradient.made
        self._falling.append(
            _ChunkInFlight(transfer, slot, landing, self.link.d2h(pairs, marks.values()))
        )

    def _land(self) -> None:
        """Hand the pipeline what has come down; the device's copy is not needed any more."""
        trip = self._falling.popleft()
        self._pipeline.land_pieces(trip.transfer.chunk, trip.landing)
        self._let_go(trip, updated=False)
        self._updating.append(trip)

    def _let_go(self, trip: _ChunkInFlight, *, updated: bool) -> None:
        """Let go of gradients that were copied from, or else, when ``updated``, were read."""
        for number, landed in trip.landing:
            gradient = self._gradients.get(number)
            if landed is None or gradient is None or (gradient.made is None) != updated:
                continue
            gradient.copies_left -= 1
            if gradient.copies_left == 0:
                del self._gradients[number]

    def _rise(self) -> None:
        """Send a chunk's new weights up; its slot is free."""
        trip = self._updating.popleft()
        self._let_go(trip, updated=True)
        landed = {number for number, gradient in trip.landing if gradient is not None}
        pairs = []
        for run in trip.transfer.runs:
            if run.parameter in landed:
                host_weight = self._host_weights[run.parameter]
                piece = slice(run.start, run.start + run.count)
                pairs.append((self._targets[run.parameter][piece], flat(host_weight.host)[piece]))
        self._risen = self.link.h2d(pairs)
        self._free.append(trip.slot)
        self._pending.discard(trip.transfer.chunk)

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Whatever fails on the way leaves a step half taken: nobody may go on from there."""
        try:
            yield
        except BaseException as error:
            self._stage = _Stage.FAILED
            self._pipeline.poison(error)
            raise
