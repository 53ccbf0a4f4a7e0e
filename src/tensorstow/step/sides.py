"""Runs a step's updates on the device, or on device and host at once.

[Note: Both at once] Gradients of the host's chunks come down (``DeviceFeed``), states of the
device's go up (``DeviceUpdater``), in one open step of the pipeline, whose ring both share. So
neither is waited for while the other may hold what it waits for: the updater's copies, which end by
themselves, come first, and a wait for the kernel ends where there is a chunk for the updater.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.tiers import Tier
from tensorstow.formats.reference import AdamScalars
from tensorstow.io.device_link import DeviceEvent, DeviceLink
from tensorstow.states.chunks import Chunk
from tensorstow.states.native_pipeline import StepKind, UpdatePipeline
from tensorstow.step.chunk_gate import ChunkGate
from tensorstow.step.device_feed import DeviceFeed
from tensorstow.step.device_update import DeviceUpdater, Work
from tensorstow.step.division import Division, Took, chunks_of_device, elements_of
from tensorstow.step.gradient_feed import Beside, HostFeed, StepFeeds
from tensorstow.step.managed_param import ManagedParam, StepPlan
from tensorstow.tensors.dtensor import flat


class DeviceUpdates:
    """One optimizer's steps on both sides. It lives on the thread that steps."""

    def __init__(
        self,
        link: DeviceLink,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        feeds: Sequence[DeviceFeed],
        updater: DeviceUpdater,
        division: Division,
    ) -> None:
        """Take what feeds the host's chunks, if it may have any, and what updates the device's."""
        self._link = link
        self._pipeline = pipeline
        self._chunks = chunks
        self._feeds = feeds
        self._updater = updater
        self._division = division
        self._commits_only = StepFeeds(pipeline, chunks, {Tier.HOST: HostFeed(pipeline)})
        self._plan: StepPlan | None = None
        self._unsent = 0
        self.chunks_of_host: Sequence[Chunk] = ()
        self._device: Sequence[Chunk] = chunks

    # --- a step ---

    def begin(self, plan: StepPlan, beside: Beside = Beside.NOTHING) -> None:
        """Begin a step, with the gradients that ``plan`` has; ``close`` runs it."""
        if beside is not Beside.NOTHING:
            message = (
                "Updates on the device were asked for beside the model's own work: they run inside"
                ' step(). Use overlap="none", or update_on="host".'
            )
            raise OptionError(message)
        if not plan.updates:
            self._commits_only.begin(plan)
            return
        self._plan = plan
        kind = StepKind(open=True, capture=plan.commits, outside=True)
        self._pipeline.step(plan.rows, plan.scalars, kind)

    def offer(
        self, param: ManagedParam, gradient: torch.Tensor, copied: DeviceEvent | None = None
    ) -> None:
        """Raise OptionError: all gradients are known when the step begins."""
        del param, gradient, copied
        message = "A gradient was offered to a step whose updates run on the device."
        raise OptionError(message)

    def close(self) -> None:
        """Run the updates."""
        plan = self._plan
        if plan is None:
            return
        try:
            host, device = self._run(plan)
            self._pipeline.end_outside()
        except BaseException as error:  # an interrupt too: a chunk may be half a step ahead
            self._pipeline.poison(error)
            # Whoever goes on from a commit writes to the weights that may still be coming down.
            with suppress(RuntimeError):  # the device fails here once more, and has been told
                self._link.synchronize()
            raise
        self._plan = None
        self._division.note(host, device, commits=plan.commits)

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
        """Return: updates run in the caller's stream, and ``close`` has joined the host's."""

    def abort(self) -> None:
        """Forget the step: its store is gone, or it has failed."""
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
        """Let the device update ``share`` of the elements from now on; return its chunks."""
        self._device = chunks_of_device(self._chunks, share)
        there = {chunk.number for chunk in self._device}
        self.chunks_of_host = [chunk for chunk in self._chunks if chunk.number not in there]
        self._pipeline.set_outside(sorted(there))
        self._updater.serve(self._device)
        for feed in self._feeds:
            feed.serve(self.chunks_of_host)
        return self.chunks_of_host, self._device

    @property
    def device_share(self) -> float:
        """Return the share of the elements that the device updates."""
        return elements_of(self._device) / max(elements_of(self._chunks), 1)

    # --- inside ---

    def _run(self, plan: StepPlan) -> tuple[Took, Took]:
        """Update in an open step that the pipeline has begun.

        Returns what the host and the device took, when all weights are new for whatever the
        caller's stream does next.
        """
        if self._division.counts:  # what makes the gradients is waited for first
            self._link.record_event().synchronize()
        begin = time.monotonic()
        gate = ChunkGate(())  # all gradients are known: nobody waits for one
        self._unsent = 1 + len(self._feeds)
        self._updater.begin(works_of(plan), self._sent, all_weights=plan.commits)
        for feed in self._feeds:
            feed.begin(plan, gate)
            feed.close(self._sent)
        ended: dict[str, float] = {}
        while True:
            self._updater.move_on()
            for feed in self._feeds:
                feed.move_on()
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
            Took(elements_of(self.chunks_of_host), ended["host"]),
            Took(elements_of(self._device), ended["device"]),
        )

    def _sent(self) -> None:
        """Close the pipeline's step when neither side will hand over any more gradients."""
        self._unsent -= 1
        if self._unsent == 0:
            self._pipeline.close_step()

    def _wait(self) -> None:
        """Return when one side can go on."""
        if self._updater.under_way:
            self._updater.end_one()
            return
        for feed in self._feeds:
            if not feed.is_over:
                feed.wait_for_one()
                return
        self._updater.take_one()


def works_of(plan: StepPlan) -> dict[int, Work]:
    """Return what the step does with each parameter, by number."""
    table = [AdamScalars(*row) for row in plan.scalars.tolist()]
    works = {}
    for update in plan.updates:
        row = plan.rows[update.param.number]
        if update.gradient is not None:
            gradient = flat(update.gradient)
            works[update.param.number] = Work(
                gradient, table[row.scalars], row.key, row.seed_master
            )
    return works
