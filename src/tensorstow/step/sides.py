"""The two sides of a step: chunks that the host updates, and chunks that the device updates.

[Note: Both at once] Gradients of the host's chunks come down (the ferry), states of the device's go
up (the updater), in one open step of the pipeline, whose ring both share. So neither is waited for
while the other may hold what it waits for: the updater's copies, which end by themselves, come
first, and a wait for the kernel ends where there is a chunk for the updater.
"""

import time
from collections.abc import Mapping, Sequence

from tensorstow.io.device_link import DeviceLink
from tensorstow.states.chunks import Chunk
from tensorstow.states.native_pipeline import UpdatePipeline
from tensorstow.step.device_feed import DeviceFeed
from tensorstow.step.device_update import DeviceUpdater, Work
from tensorstow.step.division import Took, chunks_of_device, elements_of


class Sides:
    """One optimizer's updates on both sides. It lives on the thread that steps."""

    def __init__(
        self,
        link: DeviceLink,
        pipeline: UpdatePipeline,
        chunks: Sequence[Chunk],
        device_feed: DeviceFeed | None,
        updater: DeviceUpdater,
    ) -> None:
        """Take who carries for the host's chunks, if it may have any, and for the device's."""
        self.link = link
        self._pipeline = pipeline
        self._chunks = chunks
        self._device_feed = device_feed
        self._updater = updater
        self.chunks_of_host: Sequence[Chunk] = ()
        self._device: Sequence[Chunk] = chunks

    def divide(self, share: float) -> Sequence[Chunk]:
        """Let the device update ``share`` of the elements from now on; return its chunks."""
        self._device = chunks_of_device(self._chunks, share)
        there = {chunk.number for chunk in self._device}
        self.chunks_of_host = [chunk for chunk in self._chunks if chunk.number not in there]
        self._pipeline.set_outside(sorted(there))
        self._updater.serve(self._device)
        if self._device_feed is not None:
            self._device_feed.serve(self.chunks_of_host)
        return self._device

    @property
    def share(self) -> float:
        """Return the share of the elements that the device updates."""
        return elements_of(self._device) / max(elements_of(self._chunks), 1)

    def run(
        self, works: Mapping[int, Work], *, all_weights: bool, measured: bool
    ) -> tuple[Took, Took]:
        """Update by ``works``, by parameter, in an open step that the pipeline has begun.

        Returns what the host and the device took, when all weights are new for whatever the
        caller's stream does next. ``all_weights``: fp32 ones that the device has updated come down
        too. ``measured``: what makes the gradients is waited for first. Raises what failed.
        """
        made = self.link.record_event()
        if measured:
            made.synchronize()
        begin = time.monotonic()
        device_feed = self._device_feed
        self._updater.begin(works, all_weights=all_weights)
        if device_feed is not None:
            device_feed.open(works)
            for number, work in works.items():
                device_feed.offer(number, work.gradient, made)
            device_feed.end()
        ended: dict[str, float] = {}
        while True:
            self._updater.move_on()
            if device_feed is not None:
                device_feed.move_on()
            if self._updater.is_over:
                ended.setdefault("device", time.monotonic() - begin)
            if device_feed is None or device_feed.is_over:
                ended.setdefault("host", time.monotonic() - begin)
            if len(ended) == 2:
                break
            self._wait()
        if device_feed is not None:
            device_feed.finish()
        return (
            Took(elements_of(self.chunks_of_host), ended["host"]),
            Took(elements_of(self._device), ended["device"]),
        )

    def _wait(self) -> None:
        """Return when one side can go on."""
        if self._updater.under_way:
            self._updater.end_one()
        elif self._device_feed is None or self._device_feed.is_over:
            self._updater.take_one()
        else:
            self._device_feed.wait_for_one()
