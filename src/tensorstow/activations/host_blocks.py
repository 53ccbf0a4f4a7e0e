"""Host memory of saved activations, reused for storages of the same size."""

import sys
from collections import defaultdict

import torch

from tensorstow.base.sizes import round_up
from tensorstow.io.allocator import empty_cache
from tensorstow.io.arena import Arena
from tensorstow.io.device_link import CopyQueue, DeviceEvent, DeviceLink
from tensorstow.io.files import ALIGN
from tensorstow.io.pinned import HostMemory, PinnedBlock
from tensorstow.memory.bounded_bytes import BoundedBytes


class HostBlocks:
    """Idle blocks, and blocks that a copy to the device still reads."""

    def __init__(self, budget: int | None) -> None:
        """Hold nothing yet.

        ``budget`` bounds all bytes, in use or not; None: twice the peak of bytes in use.
        """
        self._is_bounded = budget is not None
        self.used = BoundedBytes(sys.maxsize if budget is None else budget)
        """Bytes of storages in host memory, in blocks or not; the pool counts them."""
        self._idle: defaultdict[tuple[torch.device, int], list[HostMemory]] = defaultdict(list)
        """Idle blocks by device and bytes."""
        self._uploads: CopyQueue[tuple[torch.device, HostMemory]] = CopyQueue()
        self._unused_bytes = 0

    @property
    def nbytes(self) -> int:
        """The bytes in host memory, in use or not."""
        return self.used.held + self._unused_bytes

    def take(self, nbytes: int, device: torch.device, link: DeviceLink) -> HostMemory:
        """Return memory for ``nbytes`` from which ``device`` can copy."""
        padded = round_up(nbytes, ALIGN)
        while self._uploads and self._is_too_much(padded):
            of, block = self._uploads.pop()  # waits: blocks that the device reads fill the budget
            self._unused_bytes -= block.nbytes
            self.give_back(block, of)
        if self._idle[device, padded]:
            self._unused_bytes -= padded
            return self._idle[device, padded].pop()
        if self._is_too_much(padded):
            # All idle blocks are of other sizes or devices, and cannot be used here.
            self._unused_bytes -= sum(n * len(blocks) for (_, n), blocks in self._idle.items())
            self._idle.clear()
        if device.type == "cpu":
            empty_cache(padded)  # of the tensors whose elements come back
            return Arena(padded, in_children=False)
        return PinnedBlock(padded, device, link.synchronize)

    def give_back(
        self, block: HostMemory, device: torch.device, ready: DeviceEvent | None = None
    ) -> None:
        """Keep a block for the next storage of its size if the budget has room.

        ``ready`` is the event after the copy that still reads it; None: no copy does.
        """
        if ready is not None and not ready.query():
            self._uploads.add((device, block), ready)
        elif self._is_too_much(block.nbytes):
            return
        else:
            self._idle[device, block.nbytes].append(block)
        self._unused_bytes += block.nbytes

    def drop_idle(self, nbytes: int) -> None:
        """Free idle blocks of the CPU until ``nbytes`` more fit.

        Storages of the CPU come with their own memory; those of a device take idle blocks.
        """
        for (device, padded), blocks in self._idle.items():
            while device.type == "cpu" and blocks and self._is_too_much(nbytes):
                blocks.pop()
                self._unused_bytes -= padded

    def settle(self) -> None:
        """Make blocks idle if their copies are complete."""
        for device, block in self._uploads.pop_complete():
            self._unused_bytes -= block.nbytes
            self.give_back(block, device)

    def clear(self) -> None:
        """Free all blocks that are not in use; pinned memory waits for its copies."""
        self._idle.clear()
        self._uploads.clear()
        self._unused_bytes = 0

    def _is_too_much(self, nbytes: int) -> bool:
        twice_the_peak = 2 * max(self.used.peak, self.used.held + nbytes)
        limit = self.used.capacity if self._is_bounded else twice_the_peak
        return self.nbytes + nbytes > limit
