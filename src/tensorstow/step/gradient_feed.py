"""Feeds: each passes final gradients to the pipeline, for weights on one tier.

[Note: Feeds] The tier of a weight decides how its gradient reaches the pipeline and how the new
weight comes back. This is known to one feed for each tier alone:

host    the kernel reads the gradient and writes the weight where they are.
device  gradients are copied to host memory by chunk, new weights are copied back (``DeviceFeed``).
disk    the weight is pinned in memory while its chunk is updated (``DiskFeed``).

A schedule begins a step, offers gradients as they become final, closes it, and waits. One count
decides when a chunk is complete, also if its parameters are on several tiers ([Note: One count]).
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Protocol

import torch

from tensorstow.base.tiers import Tier
from tensorstow.io.device_link import COMPLETE, DeviceEvent
from tensorstow.states.chunks import Chunk
from tensorstow.states.native_pipeline import StepKind, UpdatePipeline, poisoning
from tensorstow.step.chunk_gate import ChunkGate
from tensorstow.step.managed_param import ManagedParam, StepPlan


class OverlapWith(Enum):
    """What the caller does while a step runs."""

    NOTHING = "it waits"
    FORWARD = "it computes the next forward; all gradients are known"
    BACKWARD = "it computes the backward from which the gradients come"


class GradientFeed:
    """Takes final gradients of parameters on one tier to the pipeline, a step at a time.

    Methods that do nothing here are for feeds that copy gradients or pin weights.
    """

    def prepare(self, plan: StepPlan) -> None:
        """Change the rows of ``plan`` as the feed needs, before the pipeline begins by them."""

    def begin(self, plan: StepPlan, gate: ChunkGate) -> None:
        """Begin a step in which gradients follow; those that ``plan`` has are offered by it."""

    def offer(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Take a final gradient: contiguous, in the order of the weight's memory."""
        raise NotImplementedError

    def send(self, chunk: int) -> None:
        """Pass on the feed's gradients of a complete chunk."""

    def move_on(self) -> None:
        """Start all work that can start without waiting."""

    def close(self, sent: Callable[[], None]) -> None:
        """Pass on the rest: no more gradients come. ``sent`` is called after the last."""
        sent()

    def wait(self, numbers: Collection[int] | None) -> None:
        """Return when these parameters, or all, need nothing more of the feed."""

    def end(self) -> None:
        """Free what the step holds: every weight is new."""

    def needs(self, number: int) -> bool:
        """Return whether the feed may still read the gradient of a parameter of its tier."""
        raise NotImplementedError

    def join(self) -> None:
        """Make the caller's stream wait for new weights that are copied to the device."""

    @property
    def staging_bytes(self) -> int:
        """Return the pinned memory that gradients pass through."""
        return 0

    def abort(self) -> None:
        """Free what the step holds: it has failed, or its store is closed."""
        self.end()


class HostFeed(GradientFeed):
    """Gradients and weights in host memory, which the pipeline uses in place."""

    def __init__(self, pipeline: UpdatePipeline) -> None:
        """Feed ``pipeline``."""
        self._pipeline = pipeline

    def offer(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Hand the gradient to the pipeline, which reads it until the weight is new."""
        self._pipeline.add_gradient(param.number, gradient)

    def needs(self, number: int) -> bool:
        """Return whether the pipeline may still read the gradient."""
        return not self._pipeline.is_published(number)


class StepPath(Protocol):
    """Takes the steps of one optimizer: the interface that schedules use.

    A step is begun, gradients are offered as they become final, it is closed, and its weights are
    waited for. Used by the stepping thread alone.
    """

    def begin(self, plan: StepPlan, overlap_with: OverlapWith = OverlapWith.NOTHING) -> None:
        """Begin a step, with the gradients that ``plan`` has."""

    def offer(
        self, param: ManagedParam, gradient: torch.Tensor, copied: DeviceEvent | None = None
    ) -> None:
        """Take a final gradient of an open step.

        Args:
            param: Whose gradient it is.
            gradient: Contiguous, in the order of the weight's memory.
            copied: The event after which its elements are in host memory; None: they are where
                the gradient is.
        """

    def close(self) -> None:
        """End an open step: no more gradients come."""

    def wait(self, numbers: Collection[int] | None = None) -> None:
        """Block until these parameters, or all, have new weights for the caller's stream."""

    def wait_for_one(self, numbers: Sequence[int]) -> bool:
        """Wait until one more gradient is used or copied; return False if there is none."""

    def needs(self, param: ManagedParam) -> bool:
        """Return whether the gradient of ``param`` may still be read."""

    def join(self) -> None:
        """Make the caller's stream wait for new weights that are copied to the device."""

    def abort(self) -> None:
        """Free what the step holds: it has failed, or its store is closed."""

    def divide(self, share: float) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
        """Have the device update ``share`` of the elements; return the host's chunks, and its."""

    @property
    def staging_bytes(self) -> int:
        """Return the pinned memory that gradients pass through."""

    @property
    def device_bytes(self) -> int:
        """Return the device memory that states pass through."""

    @property
    def device_share(self) -> float:
        """Return the share of the elements that the device updates."""


class StepFeeds(StepPath):
    """All feeds of one optimizer behind one interface, a step at a time.

    Used by the stepping thread alone.
    """

    def __init__(
        self,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        feeds: Mapping[Tier, GradientFeed],
    ) -> None:
        """Feed ``pipeline`` by ``feeds``, in their order; one for each tier that has weights."""
        self._pipeline = pipeline
        self._feeds = feeds
        self._chunks = chunks
        self._gate = ChunkGate(chunks)
        self._is_open = self._commits = False
        self._unsent = 0
        self._arriving: deque[tuple[ManagedParam, torch.Tensor, DeviceEvent]] = deque()

    def begin(self, plan: StepPlan, overlap_with: OverlapWith = OverlapWith.NOTHING) -> None:
        """Begin a step, with the gradients that ``plan`` has.

        It is over when this returns where nothing runs beside it and all weights are in host
        memory. Otherwise more gradients may be offered, until ``close``.
        """
        for feed in self._feeds.values():
            feed.prepare(plan)
        rows = plan.rows
        self._is_open = overlap_with is OverlapWith.BACKWARD or any(row.expected for row in rows)
        self._commits = plan.commits
        crosses = any(update.param.tier is Tier.DEVICE for update in plan.updates)
        kind = StepKind(
            open=self._is_open,
            capture=plan.commits,
            resident_first=overlap_with is OverlapWith.FORWARD,
            caller="waits" if crosses or overlap_with is OverlapWith.NOTHING else "computes",
        )
        self._pipeline.step(rows, plan.scalars, kind)
        if not self._is_open:
            return
        with poisoning(self._pipeline):
            due = [u.param.number for u in plan.updates if rows[u.param.number].expected]
            given = [n for n, row in enumerate(rows) if row.gradient is not None]
            self._gate.begin(due, given)
            for feed in self._feeds.values():
                feed.begin(plan, self._gate)
            for update in plan.updates:
                # Sent by ``close``, in the best order, and not before.
                if update.gradient is not None and rows[update.param.number].expected:
                    self._gate.arrive(update.param.number)

    def offer(
        self, param: ManagedParam, gradient: torch.Tensor, copied: DeviceEvent | None = None
    ) -> None:
        """Take a final gradient of an open step; send the chunks that it completes.

        Args:
            param: Whose gradient it is.
            gradient: Contiguous, in the order of the weight's memory.
            copied: The event after which its elements are in host memory; None: they are.
        """
        if copied is None and not self._arriving:
            self._offer_now(param, gradient)
            return
        self._arriving.append((param, gradient, copied or COMPLETE))
        while self._arriving and self._arriving[0][2].query():
            self._offer_first()

    def close(self) -> None:
        """Send the rest of an open step: no more gradients come."""
        if not self._is_open:
            return
        self._is_open = False
        with poisoning(self._pipeline):
            while self._arriving:
                self._offer_first()
            self._unsent = len(self._feeds)
            for feed in self._feeds.values():
                feed.close(self._sent)
            if self._commits:  # the thread that commits cannot move a feed on
                for feed in self._feeds.values():
                    feed.wait(None)

    def wait(self, numbers: Collection[int] | None = None) -> None:
        """Block until these parameters, or all, have new weights for the caller's stream.

        Raises the pipeline's error if the step failed.
        """
        for feed in self._feeds.values():
            feed.wait(numbers)
        if numbers is None:
            self._pipeline.wait_published()
            for feed in self._feeds.values():
                feed.end()
        else:
            self._pipeline.wait_parameters(list(numbers))

    def wait_for_one(self, numbers: Sequence[int]) -> bool:
        """Wait until one more gradient is used or copied; return False if there is none.

        Args:
            numbers: Parameters whose gradients are in host memory; the first that awaits no other
                gradient is waited for.
        """
        if Tier.DEVICE in self._feeds:  # its feed holds few gradients in host memory at once
            return False
        for number in numbers:
            if self._gate.is_complete(number):
                self._pipeline.wait_parameters([number])
                return True
        if not self._arriving:
            return False
        self._offer_first()
        return True

    def needs(self, param: ManagedParam) -> bool:
        """Return whether the gradient of ``param`` may still be read."""
        return self._feeds[param.tier].needs(param.number)

    def join(self) -> None:
        """Make the caller's stream wait for new weights that are copied to the device."""
        for feed in self._feeds.values():
            feed.join()

    @property
    def staging_bytes(self) -> int:
        """Return the pinned memory that gradients pass through."""
        return sum(feed.staging_bytes for feed in self._feeds.values())

    @property
    def device_bytes(self) -> int:
        """Return 0: no states pass through a device."""
        return 0

    @property
    def device_share(self) -> float:
        """Return 0: the host updates all states."""
        return 0.0

    def divide(self, share: float) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
        """Return all chunks and none: the host updates all states."""
        del share
        return self._chunks, ()

    def abort(self) -> None:
        """Free what the step holds: it has failed, or its store is closed."""
        self._is_open = False
        self._arriving.clear()
        for feed in self._feeds.values():
            feed.abort()

    # --- inside ---

    def _offer_first(self) -> None:
        param, gradient, copied = self._arriving.popleft()
        copied.synchronize()
        self._offer_now(param, gradient)

    def _offer_now(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        complete = self._gate.arrive(param.number)
        self._feeds[param.tier].offer(param, gradient)
        for chunk in complete:
            for feed in self._feeds.values():
                feed.send(chunk)
        for feed in self._feeds.values():
            feed.move_on()

    def _sent(self) -> None:
        """Close the pipeline's step when every feed has sent all gradients."""
        self._unsent -= 1
        if self._unsent == 0:
            self._pipeline.close_step()
