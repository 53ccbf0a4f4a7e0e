"""Feeds: each passes final gradients to the pipeline, for weights on one tier.

[Note: Feeds] The tier of a weight decides how its gradient reaches the pipeline and how the new
weight comes back. Only the feed of that tier knows how:

host    the kernel reads the gradient and writes the weight where they are (``HostFeed``).
device  gradients are copied to host memory by chunk, new weights are copied back (``DeviceFeed``);
        or states are copied to the device and updated there, chunk by chunk (``DeviceUpdater``).
disk    the weight is pinned in memory while its chunk is updated (``DiskFeed``).

A schedule begins a step, offers gradients as they become final, closes it, and waits. One count
decides when a chunk is complete, also if its parameters are on several tiers ([Note: One count]).

[Note: Device updates during backward] A chunk is sent as soon as all of its gradients are final.
Hooks of gradients start work and wait for nothing; ``close`` does the rest. While shares are
measured nothing starts before ``close``, so that backward does not distort the sides' times.

[Note: Both at once] Some chunks of a step may be updated by the host (``DeviceFeed``), others by
the device (``DeviceUpdater``). Both sides share the ring of the pipeline, and either may be the
next that can go on. So neither is waited for alone while both have work left: threads wait for the
oldest copy of each side, and every copy that ends and every chunk that the pipeline finishes or
offers changes one count. The stepping thread reads the count, starts all work that can start, and
sleeps until the count differs from what it read; so no change is missed. No deadlock is possible: a
slot of the ring that one side waits for is held by a copy under way, which ends by itself, or by a
chunk that the pipeline finishes or offers without anybody's help.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import ClassVar

import torch

from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.tiers import Tier
from tensorstow.io.device_link import COMPLETE, CopyQueue, DeviceEvent
from tensorstow.states.chunks import Chunk
from tensorstow.states.kernels import Caller
from tensorstow.states.memory import StateMemory
from tensorstow.states.native_pipeline import CallerChunks, StepKind, UpdatePipeline, poisoning
from tensorstow.step.chunk_gate import ChunkGate
from tensorstow.step.managed_param import ManagedParam, StepPlan
from tensorstow.step.share_tuner import ShareTuner, SideTiming


class OverlapWith(Enum):
    """What the caller does while a step runs."""

    NOTHING = "it waits"
    FORWARD = "it computes the next forward; all gradients are known"
    BOTH = "it computes the next forward and backward with the old weights"
    BACKWARD = "it computes the backward from which the gradients come"
    BACKWARD_AND_FORWARD = "it computes that backward, and then the next forward"

    @property
    def is_early(self) -> bool:
        """Whether gradients come while the step runs."""
        return self in {OverlapWith.BACKWARD, OverlapWith.BACKWARD_AND_FORWARD}

    @property
    def goes_on_in_forward(self) -> bool:
        """Whether the next forward waits for each weight, and ``close`` for nothing."""
        return self in {OverlapWith.FORWARD, OverlapWith.BACKWARD_AND_FORWARD}


class GradientFeed:
    """Takes final gradients of parameters on one tier to the pipeline, a step at a time.

    Methods that do nothing here are for feeds that copy gradients or states, or pin weights.
    """

    updates_chunks: ClassVar[bool] = False
    """Whether the feed updates chunks in the pipeline's place: then ``close`` ends the step."""
    newest_first = False
    """Whether the step that begins uses the newest gradients first."""
    undoable = False
    """Whether the step that begins may be undone, until ``confirm``."""
    staging_bytes = 0
    """Pinned memory that gradients pass through."""
    device_bytes = 0
    """Device memory that states pass through."""
    elements = 0
    """Elements of its chunks, if they are one side's alone."""

    def __init__(self, pipeline: UpdatePipeline) -> None:
        self._pipeline = pipeline

    def prepare(self, plan: StepPlan) -> None:
        """Change the rows of ``plan`` as the feed needs, before the pipeline begins by them."""

    def begin(self, plan: StepPlan, gate: ChunkGate) -> None:
        """Begin a step; take the gradients that ``plan`` has. Others are offered later."""

    def offer(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Take a final gradient: contiguous, in the order of the weight's memory."""
        raise NotImplementedError

    def send(self, chunk: int) -> None:
        """Pass on the feed's gradients of a complete chunk."""

    def close(self, sent: Callable[[], None], *, waits: bool = True) -> None:
        """Pass on the rest: no more gradients come. ``sent`` is called after the last.

        ``waits``: whether to block until the rest has room; False: ``wait`` and ``move_on`` go on.
        """
        del waits
        sent()

    def move_on(self) -> None:
        """Start all work that can start without waiting."""

    @property
    def is_over(self) -> bool:
        """Return whether the closed step needs no more calls of ``move_on``."""
        return True

    @property
    def oldest_copy(self) -> DeviceEvent | None:
        """Return the event of the oldest copy that ``move_on`` waits for, if any."""
        return None

    def wait_for_one(self) -> None:
        """Return when one thing more can be done; the step is closed, and not over."""

    def wait(self, numbers: Collection[int] | None) -> None:
        """Return when these parameters, or all, need nothing more of the feed."""

    def end(self) -> None:
        """Free what the step holds: every weight is new."""

    def needs(self, number: int) -> bool:
        """Return whether the gradient of a parameter of the feed's tier may still be read."""
        return not self._pipeline.is_published(number)

    def join(self) -> None:
        """Make the caller's stream wait for new weights that are copied to the device."""

    def wait_computed(self) -> None:
        """Return when the caller's stream has computed the gradients."""

    def synchronize(self) -> None:
        """Return when no copy and no update of the feed is under way."""

    def pass_on(self) -> None:
        """Pass on what can be before an undoable step is closed; wait for gradients."""

    def confirm(self) -> None:
        """Make an undoable step final; it is still open."""
        self.undoable = False

    def undo(self) -> None:
        """Forget the open step, which the pipeline has undone; no copy is under way."""

    def abort(self) -> None:
        """Free the memory of the step: it has failed, or its store is closed."""
        self.end()


class HostFeed(GradientFeed):
    """Gradients and weights in host memory, which the pipeline uses in place."""

    def offer(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Hand the gradient to the pipeline, which reads it until the weight is new."""
        self._pipeline.add_gradient(param.number, gradient)


def run_to_end(
    sides: Sequence[GradientFeed], changes: CallerChunks, close: Callable[[], None]
) -> dict[GradientFeed, float]:
    """Return when all sides are over; return the seconds that each took.

    ``close`` begins the rest of the step, of which ``changes`` counts what the pipeline does.
    """
    begin = time.monotonic()
    close()
    seconds: dict[GradientFeed, float] = {}
    with ThreadPoolExecutor(len(sides)) as threads:
        either = _EitherWait(changes, threads)
        while True:
            # Read the count before the work: a change during the work then ends the wait at once.
            seen = changes.changes()
            for side in sides:
                side.move_on()
                if side.is_over:
                    seconds.setdefault(side, time.monotonic() - begin)
            busy = [side for side in sides if side not in seconds]
            if not busy:
                return seconds
            if len(busy) == 1:
                busy[0].wait_for_one()
            else:
                either.wait(busy, seen)


class _EitherWait:
    """Waits until any of several sides can go on ([Note: Both at once])."""

    def __init__(self, changes: CallerChunks, threads: ThreadPoolExecutor) -> None:
        """Wait for copies in ``threads``: one for each side, at least."""
        self._changes = changes
        self._threads = threads
        self._watched: dict[GradientFeed, tuple[DeviceEvent, Future[None]]] = {}

    def wait(self, sides: Sequence[GradientFeed], seen: int) -> None:
        """Block until the pipeline's changes are not ``seen``: a copy's end is one of them."""
        for side in sides:
            copy = side.oldest_copy
            if copy is not None and (
                side not in self._watched or self._watched[side][0] is not copy
            ):
                self._watched[side] = copy, self._threads.submit(self._signal_after, copy)
        self._changes.wait_change(seen)
        for _, ended in self._watched.values():
            if ended.done():
                ended.result()  # raises the device's error

    def _signal_after(self, copied: DeviceEvent) -> None:
        try:
            copied.synchronize()
        finally:
            self._changes.signal()


class StepFeeds:
    """All feeds of one optimizer as one interface, a step at a time.

    A schedule begins a step, offers gradients as they become final, closes it, and waits for its
    weights. Used by the stepping thread alone.
    """

    def __init__(
        self,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        feeds: Mapping[Tier, Sequence[GradientFeed]],
        share_tuner: ShareTuner,
        *,
        on_accelerator: bool = False,
    ) -> None:
        """Feed ``pipeline`` by ``feeds``, in their order, of each tier that has weights.

        ``on_accelerator``: whether forward and backward run there, and leave the cores to updates.

        Feeds of one tier have different chunks; ``share_tuner`` gets the times that they take.
        """
        self._pipeline = pipeline
        self._feeds_of = feeds
        self._feeds = [feed for of_tier in feeds.values() for feed in of_tier]
        self._has_updater = any(feed.updates_chunks for feed in self._feeds)
        self._share_tuner = share_tuner
        self._on_accelerator = on_accelerator
        self._gate = ChunkGate(chunks)
        self._is_open = self._commits = self._is_undoable = False
        self._runs_to_end = False
        """Whether ``close`` ends the step: a feed updates chunks."""
        self._is_held = False
        """Whether nothing is sent before ``close``."""
        self._helps = False
        """Whether the caller computes on the cores that updates need ([Note: Help])."""
        self._close_waits = True
        """Whether ``close`` waits for memory, rather than each read of a weight for its part."""
        self._newest_first = False
        """Whether newest gradients are used first: the next forward needs their weights first."""
        self._unsent = 0
        self._arriving: CopyQueue[tuple[ManagedParam, torch.Tensor]] = CopyQueue()
        self.arriving_bytes = 0
        """Bytes of gradients that were offered and are still being copied to host memory."""

    def begin(
        self,
        plan: StepPlan,
        overlap_with: OverlapWith = OverlapWith.NOTHING,
        *,
        undoable: bool = False,
    ) -> bool:
        """Begin a step, with the gradients that ``plan`` has; ``undoable``: until ``confirm``.

        If the caller waits and all weights are in host memory, the step is over when this returns.
        Otherwise more gradients may be offered, until ``close``. Return whether the step goes on
        when that returns: BACKWARD_AND_FORWARD is BACKWARD where the device updates or weights are
        on disk. Raises OptionError if the device updates, and ``overlap_with`` is FORWARD or BOTH.
        """
        if overlap_with is OverlapWith.BACKWARD_AND_FORWARD and (
            self._has_updater or self._feeds_of.get(Tier.DISK)
        ):
            overlap_with = OverlapWith.BACKWARD
        if self._has_updater and overlap_with in {OverlapWith.FORWARD, OverlapWith.BOTH}:
            message = (
                "Updates on the device were requested during the next forward, which would have to"
                ' wait for them by module. Use overlap="none", or update_on="host".'
            )
            raise OptionError(message)
        for feed in self._feeds:
            feed.prepare(plan)
        rows = plan.rows
        # Decide what ``close`` is left with, and what the caller does beside the step.
        is_early = overlap_with.is_early
        self._is_open = is_early or any(row.expected for row in rows)
        self._commits, self._is_undoable = plan.commits, undoable
        self._close_waits = not overlap_with.goes_on_in_forward
        self._newest_first = is_early and overlap_with.goes_on_in_forward
        self._runs_to_end = self._has_updater and bool(plan.updates)
        self._is_held = self._runs_to_end and not (is_early and self._share_tuner.is_final)
        crosses = any(update.param.tier is Tier.DEVICE for update in plan.updates)
        beside: Caller = "computes" if overlap_with is OverlapWith.BOTH else "helps"
        caller: Caller = "launches" if self._on_accelerator else beside
        if self._runs_to_end:
            caller = "updates"
        # A caller that waits is the scheduler (ADR 0056), and could not move copies on.
        elif overlap_with is OverlapWith.NOTHING and not crosses:
            caller = "waits"
        kind = StepKind(
            open=self._is_open,
            capture=plan.commits,
            resident_first=overlap_with.goes_on_in_forward,
            newest_first=self._newest_first,
            undoable=undoable,
            caller=caller,
        )
        self._helps = caller == "helps"
        self._pipeline.step(rows, plan.scalars, kind)
        if not self._is_open:
            return overlap_with.goes_on_in_forward
        with poisoning(self._pipeline):
            due = [u.param.number for u in plan.updates if rows[u.param.number].expected]
            final = [n for n, row in enumerate(rows) if row.gradient is not None]
            self._gate.begin(due, final)
            for feed in self._feeds:
                feed.newest_first, feed.undoable = self._newest_first, undoable
                feed.begin(plan, self._gate)
            for update in plan.updates:
                # Counted only: ``close`` sends them, in the best order.
                if update.gradient is not None and rows[update.param.number].expected:
                    self._gate.arrive(update.param.number)
        return overlap_with.goes_on_in_forward

    def offer(
        self, param: ManagedParam, gradient: torch.Tensor, copied: DeviceEvent | None = None
    ) -> None:
        """Take a final gradient of an open step; send the chunks that it completes.

        It is contiguous, in the order of the weight's memory. ``copied``: the event after which its
        elements are in host memory; None: they are on the gradient's device.
        """
        if copied is not None and self._has_updater:
            message = "A gradient in host memory was offered to a step that updates on the device."
            raise StowError(message)
        self.arriving_bytes += gradient.nbytes
        # Gradients are taken in the order in which they came: others wait for a copy before them.
        if copied is None and not self._arriving:
            self._take(param, gradient)
            return
        self._arriving.add((param, gradient), copied or COMPLETE)
        self._take_arrived()

    def pass_on(self) -> None:
        """Pass on what can be before an undoable step is closed; wait for gradients."""
        while self.wait_for_copy():
            pass
        for feed in self._feeds:
            feed.pass_on()

    def undo(self) -> None:
        """End an undoable step as if it had never begun; gradients are in host memory by then."""
        with poisoning(self._pipeline):
            while self._arriving:
                self._arriving.pop()
            self.arriving_bytes, self._is_open = 0, False
            for feed in self._feeds:
                # No copy may be under way while weights and states are restored.
                feed.synchronize()
            self._pipeline.undo()
            for feed in self._feeds:
                feed.undo()

    def close(self) -> None:
        """Send the rest of an open step: no more gradients come. An undoable one is final then.

        If the device updates, return when all new states and weights are in their places.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            with poisoning(self._pipeline):
                if self._is_undoable:
                    # Chunks whose states stay in memory are updated only after this.
                    self._pipeline.confirm()
                    for feed in self._feeds:
                        feed.confirm()
                while self.wait_for_copy():
                    pass
                if self._runs_to_end:
                    self._run_to_end()
                else:
                    self._close_feeds()
                if self._commits or self._runs_to_end:  # the thread that commits moves no feed on
                    for feed in self._feeds:
                        feed.wait(None)
        except BaseException:  # an interrupt too
            # Wait: a resume writes to weights that may still be copied.
            for feed in self._feeds if self._runs_to_end else ():
                with suppress(RuntimeError):  # the device's error is raised below already
                    feed.synchronize()
            raise

    def move_on(self) -> None:
        """Do all work that can be done without waiting, in the calling thread."""
        for feed in self._feeds:
            feed.move_on()
        if self._helps:
            self._pipeline.help()

    def wait(self, numbers: Collection[int] | None = None) -> None:
        """Block until these parameters, or all, have new weights for the caller's stream.

        Raises the pipeline's error if the step failed.
        """
        for feed in self._feeds:
            # Feeds come first: the pipeline waits for gradients that they still hold.
            feed.wait(numbers)
        if numbers is None:
            self._pipeline.wait_published()
            for feed in self._feeds:
                feed.end()
        else:
            self._pipeline.wait_parameters(list(numbers))
            self.move_on()

    def wait_for_one(self, numbers: Sequence[int]) -> bool:
        """Wait until one more gradient in host memory is used; return False if none can be.

        ``numbers``: parameters whose gradients are there, or are being copied there, the oldest
        first; that which is used next, of those that await no other gradient, is waited for. No
        copy is: the device may have far to go to it.
        """
        if self._feeds_of.get(Tier.DEVICE):  # they hold few gradients in host memory at once
            return False
        self._take_arrived()
        for number in reversed(numbers) if self._newest_first else numbers:
            if self._gate.is_complete(number):
                self._pipeline.wait_parameters([number])
                return True
        return False

    def wait_for_copy(self) -> bool:
        """Wait for the oldest gradient that is being copied; return False if there is none."""
        if not self._arriving:
            return False
        self._take(*self._arriving.pop())
        return True

    def needs(self, param: ManagedParam) -> bool:
        """Return whether the gradient of ``param`` may still be read."""
        return any(feed.needs(param.number) for feed in self._feeds_of[param.tier])

    def join(self) -> None:
        """Make the caller's stream wait for new weights that are copied to the device."""
        for feed in self._feeds:
            feed.join()

    @property
    def works_between_reads(self) -> bool:
        """Return whether a read of a weight that is new is to call ``wait(())`` too.

        Where others are pinned it has to have room; or its thread updates what is ready.
        """
        return self._helps or bool(self._feeds_of.get(Tier.DISK))

    def counted_in(self, memory: StateMemory) -> StateMemory:
        """Return ``memory`` with the buffers that gradients and states pass through."""
        return replace(
            memory,
            staging_bytes=sum(feed.staging_bytes for feed in self._feeds),
            device_bytes=sum(feed.device_bytes for feed in self._feeds),
        )

    def abort(self) -> None:
        """Free what the step holds: it has failed, or its store is closed."""
        self._is_open = False
        self._arriving.clear()
        self.arriving_bytes = 0
        for feed in self._feeds:
            feed.abort()

    # --- inside ---

    def _take_arrived(self) -> None:
        """Take the gradients whose copies are complete."""
        for arrived in self._arriving.pop_complete():
            self._take(*arrived)

    def _take(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        self.arriving_bytes -= gradient.nbytes
        complete = self._gate.arrive(param.number)
        # A feed gets a gradient only if its side updates elements of the parameter.
        is_of = {True: param.updates_on_device, False: param.updates_on_host}
        for feed in self._feeds_of[param.tier]:
            if is_of[feed.updates_chunks]:
                feed.offer(param, gradient)
        if self._is_held:
            return
        for chunk in complete:
            for feed in self._feeds:
                feed.send(chunk)
        self.move_on()

    def _close_feeds(self) -> None:
        # All feeds are counted first: ``close`` of one may report at once.
        self._unsent = len(self._feeds)
        for feed in self._feeds:
            feed.close(self._sent, waits=self._close_waits)

    def _sent(self) -> None:
        """Close the pipeline's step when every feed has sent all gradients."""
        self._unsent -= 1
        if self._unsent == 0:
            self._pipeline.close_step()

    def _run_to_end(self) -> None:
        """Take the rest of a step to its end, and note the time of each side."""
        if self._share_tuner.counts:  # else the time of backward on the device would count too
            for feed in self._feeds:
                feed.wait_computed()
        seconds = run_to_end(self._feeds, self._pipeline.caller_chunks, self._close_feeds)
        self._pipeline.caller_chunks.end()
        host, device = (_timing_of(seconds, on_device=side) for side in (False, True))
        self._share_tuner.note(host, device, commits=self._commits)


def _timing_of(seconds: Mapping[GradientFeed, float], *, on_device: bool) -> SideTiming:
    """Return the elements of one side, and the time until its last one was updated."""
    side = [feed for feed in seconds if feed.updates_chunks == on_device]
    return SideTiming(sum(f.elements for f in side), max(seconds[f] for f in side))
