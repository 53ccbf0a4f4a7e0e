"""Runs a step's updates on the device, or on device and host at once.

[Note: Both at once] Gradients of the host's chunks are copied to the host (``DeviceFeed``), states
of the device's chunks to the device (``DeviceUpdater``), in one open step of the pipeline, whose
ring both share. One side may hold a slot that the other needs, or may be able to start more work,
so while both have work left they are polled in turn, and neither is waited for. Each side is given
the parameters of its own chunks; a parameter with elements in chunks of both is given to both.

[Note: Device updates beside backward] A chunk is sent as soon as all of its gradients are final.
Hooks of gradients start work and wait for nothing; ``close`` does the rest. While shares are
measured nothing starts before ``close``, so that the sides are timed without backward beside them.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.tiers import Tier
from tensorstow.formats.reference import AdamScalars
from tensorstow.io.device_link import DeviceEvent, DeviceLink
from tensorstow.states.chunks import Chunk
from tensorstow.states.native_pipeline import StepKind, UpdatePipeline
from tensorstow.step.chunk_gate import ChunkGate
from tensorstow.step.device_feed import DeviceFeed
from tensorstow.step.device_updater import DeviceParamUpdate, DeviceUpdater
from tensorstow.step.gradient_feed import HostFeed, OverlapWith, StepFeeds, StepPath
from tensorstow.step.managed_param import ManagedParam, StepPlan
from tensorstow.step.share_tuner import ShareTuner, SideTiming, chunks_of_device, elements_of
from tensorstow.tensors.dtensor import flat

_NAP = 2e-4
"""Seconds; a chunk takes about as long on either side."""


class HybridStepPath(StepPath):
    """``StepPath`` whose updates run on the device, or divided between device and host.

    Used by the stepping thread alone.
    """

    def __init__(
        self,
        link: DeviceLink,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        feeds: Sequence[DeviceFeed],
        updater: DeviceUpdater,
        share_tuner: ShareTuner,
    ) -> None:
        """Use the feeds of the host's chunks, if any, and the updater of the device's."""
        self._link = link
        self._pipeline = pipeline
        self._chunks = chunks
        self._feeds = feeds
        self._updater = updater
        self._share_tuner = share_tuner
        self._commits_only = StepFeeds(pipeline, chunks, {Tier.HOST: HostFeed(pipeline)})
        self._gate = ChunkGate(chunks)
        self._plan: StepPlan | None = None
        self._overlaps_backward = False
        """Chunks are updated before ``close``."""
        self._unsent = 0
        self.chunks_of_host: Sequence[Chunk] = ()
        self._device: Sequence[Chunk] = chunks

    # --- a step ---

    def begin(self, plan: StepPlan, overlap_with: OverlapWith = OverlapWith.NOTHING) -> None:
        """Begin a step, with the gradients that ``plan`` has; ``close`` ends it.

        Args:
            plan: The updates and their scalars.
            overlap_with: What the caller does meanwhile.

        Raises:
            OptionError: ``overlap_with`` is FORWARD.
        """
        if overlap_with is OverlapWith.FORWARD:
            message = (
                "Updates on the device were requested beside the next forward, which would have to"
                ' wait for them by module. Use overlap="backward" or "none", or update_on="host".'
            )
            raise OptionError(message)
        if not plan.updates:
            self._commits_only.begin(plan)
            return
        self._plan = plan
        self._overlaps_backward = (
            overlap_with is OverlapWith.BACKWARD and self._share_tuner.is_final
        )
        kind = StepKind(open=True, capture=plan.commits, caller="updates")
        self._pipeline.step(plan.rows, plan.scalars, kind)
        self._gate.begin({update.param.number for update in plan.updates})
        there = [update for update in plan.updates if update.param.updates_on_device]
        self._updater.begin(
            device_param_updates(replace(plan, updates=there)), all_weights=plan.commits
        )
        here = [update for update in plan.updates if update.param.updates_on_host]
        for feed in self._feeds:
            feed.begin(replace(plan, updates=here), self._gate)
        for update in plan.updates:
            if update.gradient is not None:  # sent by ``close``, in the best order
                self._gate.arrive(update.param.number)

    def offer(
        self, param: ManagedParam, gradient: torch.Tensor, copied: DeviceEvent | None = None
    ) -> None:
        """Take a final gradient; start the updates of complete chunks, if they may start now.

        Args:
            param: Whose gradient it is.
            gradient: Contiguous, in the order of the weight's memory.
            copied: None: no gradient has come down to be updated on the device.

        Raises:
            StowError: ``copied`` is an event.
        """
        if copied is not None:
            message = "A gradient in host memory was offered to a step that updates on the device."
            raise StowError(message)
        complete = self._gate.arrive(param.number)
        if param.updates_on_device:
            self._updater.offer(param.number, gradient)
        for feed in self._feeds if param.updates_on_host else ():
            feed.offer(param, gradient)
        if self._overlaps_backward:
            for chunk in complete:
                self._updater.send(chunk)
                for feed in self._feeds:
                    feed.send(chunk)
            self._move_on()

    def close(self) -> None:
        """Run the updates that have not been, and wait for all."""
        plan = self._plan
        if plan is None:
            return
        try:
            host, device = self._run()
            self._pipeline.caller_chunks.end()
        except BaseException as error:  # an interrupt too: a chunk may be half a step ahead
            self._pipeline.poison(error)
            # A resume writes to weights that may still be copied.
            with suppress(RuntimeError):  # the device's error is raised below already
                self._link.synchronize()
            raise
        self._plan = None
        self._share_tuner.note(host, device, commits=plan.commits)

    def wait(self, numbers: Collection[int] | None = None) -> None:
        """Return: ``close`` has waited for all."""

    def wait_for_one(self, numbers: Sequence[int]) -> bool:
        """Return False: no gradient is ever held beside the caller's work."""
        del numbers
        return False

    def needs(self, param: ManagedParam) -> bool:
        """Return whether the gradient of ``param`` may still be read."""
        return not self._pipeline.is_published(param.number)

    def join(self) -> None:
        """Return: ``close`` ended when the host had seen all new states and weights."""

    def abort(self) -> None:
        """Drop the step: its store is closed, or it has failed."""
        self._plan = None

    @property
    def staging_bytes(self) -> int:
        """Return the pinned memory that gradients and weights pass through."""
        return sum(feed.plan.nbytes for feed in self._feeds)

    @property
    def device_bytes(self) -> int:
        """Return the device memory that states pass through."""
        return self._updater.device_bytes

    # --- which side updates what ---

    def divide(self, share: float) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
        """Divide the chunks: the device updates ``share`` of the elements from now on."""
        self._device = chunks_of_device(self._chunks, share)
        there = {chunk.number for chunk in self._device}
        self.chunks_of_host = [chunk for chunk in self._chunks if chunk.number not in there]
        self._pipeline.caller_chunks.choose(sorted(there))
        self._updater.serve(self._device)
        for feed in self._feeds:
            feed.serve(self.chunks_of_host)
        return self.chunks_of_host, self._device

    @property
    def device_share(self) -> float:
        """Return the share of the elements that the device updates."""
        return elements_of(self._device) / max(elements_of(self._chunks), 1)

    # --- inside ---

    def _run(self) -> tuple[SideTiming, SideTiming]:
        """Update the rest of an open step; all gradients are final.

        Returns the timings of host and device; the caller's stream then sees all new weights.
        """
        if self._share_tuner.counts:  # what makes the gradients is waited for first
            self._link.record_event().synchronize()
        begin = time.monotonic()
        self._unsent = 1 + len(self._feeds)
        self._updater.close(self._sent)
        for feed in self._feeds:
            feed.close(self._sent)
        ended: dict[str, float] = {}
        while True:
            self._move_on()
            if self._updater.is_over:
                ended.setdefault("device", time.monotonic() - begin)
            if all(feed.is_over for feed in self._feeds):
                ended.setdefault("host", time.monotonic() - begin)
            if len(ended) == 2:
                break
            self._wait()
        for feed in self._feeds:
            feed.wait()
        return (
            SideTiming(elements_of(self.chunks_of_host), ended["host"]),
            SideTiming(elements_of(self._device), ended["device"]),
        )

    def _move_on(self) -> None:
        """Start all work that can start without waiting."""
        self._updater.move_on()
        for feed in self._feeds:
            feed.move_on()

    def _sent(self) -> None:
        """Close the pipeline's step when both sides have sent all gradients."""
        self._unsent -= 1
        if self._unsent == 0:
            self._pipeline.close_step()

    def _wait(self) -> None:
        """Return when one side can go on."""
        busy = [feed for feed in self._feeds if not feed.is_over]
        if busy and not self._updater.is_over:  # also while no chunk can be acquired
            self._pipeline.caller_chunks.check()  # else nobody would hear of a failed disk
            time.sleep(_NAP)
        elif busy:
            busy[0].wait_for_one()
        elif self._updater.under_way:
            self._updater.end_one()
        else:
            self._updater.start_one()


def device_param_updates(plan: StepPlan) -> dict[int, DeviceParamUpdate]:
    """Return the update of each parameter, by number."""
    table = [AdamScalars(*row) for row in plan.scalars.tolist()]
    updates = {}
    for update in plan.updates:
        row = plan.rows[update.param.number]
        gradient = None if update.gradient is None else flat(update.gradient)
        updates[update.param.number] = DeviceParamUpdate(
            gradient, table[row.scalars], row.key, row.seed_master
        )
    return updates
