"""What the feeds of weights on an accelerator share: gradients are sent by chunk.

A parameter on an accelerator may have elements in chunks that the host updates (``DeviceFeed``) and
in chunks that the device updates (``DeviceUpdater``). Each feed serves its own chunks, and takes
the gradients of all parameters in them. It holds a gradient until the last of its chunks that has
the parameter needs it no more, and sends a chunk's gradients when all of them are final.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

import torch

from tensorstow.base.errors import StowError
from tensorstow.io.device_link import DeviceEvent, DeviceLink
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import Segment
from tensorstow.states.native_pipeline import UpdatePipeline, poisoning
from tensorstow.step.chunk_gate import ChunkGate
from tensorstow.step.gradient_feed import GradientFeed
from tensorstow.step.host_weight import HostWeight
from tensorstow.step.managed_param import ManagedParam, StepPlan
from tensorstow.step.share_tuner import elements_of
from tensorstow.tensors.dtensor import flat, has_offloaded_gradient


@dataclass(eq=False, slots=True)
class LinkGradient:
    """A final gradient that some chunks of a feed still need."""

    flat: torch.Tensor
    computed: DeviceEvent | None
    """The event after which it is complete. None: it is in host memory."""
    chunks_left: int

    def part(self, run: Segment) -> torch.Tensor:
        """Return the elements of a chunk's segment."""
        return part_of(self.flat, run)


class FeedStage(Enum):
    """How far a feed is in a step."""

    OVER = "no step is under way"
    OPEN = "gradients may come"
    CLOSED = "all gradients are final, and some chunks were not sent"
    SENT = "all chunks were sent, and some are not finished"
    FAILED = "the step failed half way"

    def then(self, stage: "FeedStage") -> "FeedStage":
        """Return ``stage``; raise StowError if it may not follow this one."""
        if stage not in _NEXT[self]:
            message = f"A feed cannot go on to {stage.name}: {self.value}."
            raise StowError(message)
        return stage


_NEXT = {
    FeedStage.OVER: {FeedStage.OPEN},
    # OVER follows OPEN if the step is undone.
    FeedStage.OPEN: {FeedStage.CLOSED, FeedStage.FAILED, FeedStage.OVER},
    FeedStage.CLOSED: {FeedStage.SENT, FeedStage.FAILED},
    FeedStage.SENT: {FeedStage.OVER, FeedStage.FAILED},
    FeedStage.FAILED: {FeedStage.FAILED},
}


def is_on_host(gradient: torch.Tensor, param: ManagedParam) -> bool:
    """Return whether a gradient was copied to host memory, of a parameter on an accelerator."""
    return gradient.device != param.parameter.device


class LinkFeed(GradientFeed):
    """Gradients of weights on an accelerator, for the chunks of one side.

    Used by the stepping thread alone; every call starts all work that can start without waiting.
    """

    def __init__(
        self,
        link: DeviceLink,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        host_weights: Mapping[int, HostWeight],
    ) -> None:
        """Serve the parameters of ``host_weights``, by number, that have elements in ``chunks``."""
        super().__init__(pipeline)
        self.link = link
        self._host_weights = host_weights
        self._chunks: dict[int, Chunk] = {}
        self._chunks_of: dict[int, list[int]] = {}
        """Chunks by number of a parameter in them."""
        self.serve(chunks)
        self._report_sent: Callable[[], None] = _no_report
        self._weights: dict[int, torch.Tensor] = {}
        """Memory of the weights that the step expects gradients for, as it was at the beginning."""
        self._gradients: dict[int, LinkGradient] = {}
        self._unsent: set[int] = set()
        """Chunks that have a gradient and were not sent."""
        self._unfinished: set[int] = set()
        """Chunks that have a gradient and were not finished."""
        self._ready: deque[int] = deque()
        """Chunks of ``_unsent`` whose gradients are all final."""
        self._stage = FeedStage.OVER

    def serve(self, chunks: Iterable[Chunk]) -> None:
        """Serve ``chunks``, a subset of those at creation; called between steps."""
        self._chunks.clear()
        self._chunks_of.clear()
        for chunk in chunks:
            for number in chunk.owners:
                if number in self._host_weights:
                    self._chunks[chunk.number] = chunk
                    self._chunks_of.setdefault(number, []).append(chunk.number)
        self.elements = elements_of(self._chunks.values())

    # --- a step ---

    def begin(self, plan: StepPlan, gate: ChunkGate) -> None:
        """Begin a step, which the pipeline has begun, with the gradients that ``plan`` has."""
        del gate  # its owner calls ``send``
        self._stage = self._stage.then(FeedStage.OPEN)
        for held in (self._gradients, self._unsent, self._unfinished, self._ready):
            held.clear()
        updates = [u for u in plan.updates if u.param.number in self._chunks_of]
        self._begin(replace(plan, updates=updates))
        numbers = (update.param.number for update in updates)
        self._weights = {n: flat(self._host_weights[n].parameter) for n in numbers}
        # One event is enough: the caller's stream computes all of these gradients.
        computed = self.link.record_event() if updates else None
        for update in updates:
            if update.gradient is not None:
                on_host = has_offloaded_gradient(update.param.owner)
                self._hold(update.param.number, update.gradient, None if on_host else computed)

    def offer(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Take a parameter's contiguous gradient, which the caller's stream computes, or has."""
        computed = None if is_on_host(gradient, param) else self.link.record_event()
        self._hold(param.number, gradient, computed)

    def send(self, chunk: int) -> None:
        """Send a chunk's gradients as soon as possible: it awaits no more of them."""
        if chunk in self._unsent:
            self._ready.append(chunk)

    def close(self, sent: Callable[[], None], *, waits: bool = True) -> None:
        """End the gradients; send the rest in the pipeline's order, and call ``sent`` then."""
        del waits  # ``move_on`` sends what has room
        self._report_sent = sent
        # No more gradients come: chunks that still await some go without them.
        self._ready = deque(n for n in self._pipeline.order_now() if n in self._unsent)
        self._stage = self._stage.then(FeedStage.CLOSED)
        self.move_on()

    def move_on(self) -> None:
        """Start all work that can start without waiting."""
        if self._stage not in {FeedStage.OVER, FeedStage.FAILED}:
            with self._failing():
                self._move_on()

    def wait_for_one(self) -> None:
        """Return when one thing more can be done; the step is closed, and not over."""
        with self._failing():
            self._wait_for_one()

    @property
    def is_over(self) -> bool:
        """Return whether no chunk of the step needs the feed any more."""
        return self._stage is FeedStage.OVER

    def needs(self, number: int) -> bool:
        """Return whether the gradient of a parameter is still to be copied or read."""
        return number in self._gradients

    def wait_computed(self) -> None:
        """Return when all work in the caller's stream so far is complete."""
        self.link.record_event().synchronize()

    def undo(self) -> None:
        """Forget the open step, and its gradients."""
        for held in (self._gradients, self._unsent, self._unfinished, self._ready, self._weights):
            held.clear()
        self._stage = self._stage.then(FeedStage.OVER)

    def synchronize(self) -> None:
        """Return when no copy and no update is under way."""
        self.link.synchronize()

    # --- for subclasses ---

    def _begin(self, plan: StepPlan) -> None:
        """Begin a step; ``plan`` has updates of the feed's own parameters alone."""
        raise NotImplementedError

    def _move_on(self) -> None:
        raise NotImplementedError

    def _wait_for_one(self) -> None:
        raise NotImplementedError

    def _hold(self, number: int, gradient: torch.Tensor, computed: DeviceEvent | None) -> None:
        """Keep a gradient, complete after ``computed``; None: it is complete in host memory."""
        chunks = self._chunks_of.get(number, [])
        if chunks:
            self._gradients[number] = LinkGradient(gradient.view(-1), computed, len(chunks))
        self._unsent.update(chunks)
        self._unfinished.update(chunks)

    def _drop_gradient(self, number: int) -> None:
        """Free a gradient that one chunk fewer needs, if that was the last one."""
        gradient = self._gradients[number]
        gradient.chunks_left -= 1
        if gradient.chunks_left == 0:
            del self._gradients[number]

    def _report_progress(self, *, all_sent: bool) -> None:
        """End the stage if its work is done; ``all_sent``: the pipeline has all gradients."""
        if self._stage is FeedStage.CLOSED and all_sent:
            self._report_sent()
            self._report_sent = _no_report  # the caller holds this feed: no cycle outlives the step
            self._stage = self._stage.then(FeedStage.SENT)
        if self._stage is FeedStage.SENT and not self._unfinished:
            self._stage = self._stage.then(FeedStage.OVER)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Poison the pipeline on any error: only a part of the step is done."""
        try:
            with poisoning(self._pipeline):
                yield
        except BaseException:
            self._stage = self._stage.then(FeedStage.FAILED)
            raise


def _no_report() -> None:
    """Report nothing."""


def part_of(whole: torch.Tensor, run: Segment) -> torch.Tensor:
    """Return the elements of a parameter that a segment of a chunk has."""
    return whole[run.start : run.start + run.count]
