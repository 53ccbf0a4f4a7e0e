"""Host memory of saved activations, used again for storages of the same size."""

from collections import defaultdict, deque

import torch

from tensorstow.activations.saved import Block
from tensorstow.io.arena import Arena
from tensorstow.io.device_link import DeviceEvent, DeviceLink
from tensorstow.io.files import ALIGN
from tensorstow.io.pinned import PinnedBlock


class HostBlocks:
    """Blocks that nobody uses now, and blocks that a copy to the device still reads."""

    def __init__(self, budget: int | None) -> None:
        """Hold nothing yet.

        Args:
            budget: The most bytes, those in use included; None: twice as many as were in use at
                once.
        """
        self._budget = budget
        self._most = 0
        """The most bytes in use at once."""
        self.held = 0
        """Bytes of storages in host memory, blocks or not; the pool counts them."""
        self._idle: defaultdict[tuple[torch.device, int], list[Block]] = defaultdict(list)
        """By the device that copies from them, and bytes."""
        self._uploads: deque[tuple[DeviceEvent, torch.device, Block]] = deque()
        self._unused_bytes = 0

    @property
    def nbytes(self) -> int:
        """The bytes in host memory, in use or not."""
        return self.held + self._unused_bytes

    def take(self, nbytes: int, device: torch.device, link: DeviceLink) -> Block:
        """Return memory for ``nbytes`` from which ``device`` can copy."""
        padded = -(-nbytes // ALIGN) * ALIGN
        self._most = max(self._most, self.held + padded)
        while self._uploads and self._is_too_much(padded):
            ready, of, block = self._uploads.popleft()
            ready.synchronize()  # the host is ahead of the device by all of the budget
            self._unused_bytes -= block.nbytes
            self.give_back(block, of)
        if self._idle[device, padded]:
            self._unused_bytes -= padded
            return self._idle[device, padded].pop()
        if self._is_too_much(padded):
            self._unused_bytes -= sum(n * len(blocks) for (_, n), blocks in self._idle.items())
            self._idle.clear()
        if device.type == "cpu":
            return Arena(padded, in_children=False)
        return PinnedBlock(padded, device, link.synchronize)

    def give_back(
        self, block: Block, device: torch.device, ready: DeviceEvent | None = None
    ) -> None:
        """Keep a block for the next of its size, where the budget has room.

        Args:
            block: Memory that was taken.
            device: For which.
            ready: An event behind the copy that still reads it; None: nothing does.
        """
        if ready is not None and not ready.query():
            self._uploads.append((ready, device, block))
        elif self._is_too_much(block.nbytes):
            return
        else:
            self._idle[device, block.nbytes].append(block)
        self._unused_bytes += block.nbytes

    def drop_idle(self, nbytes: int) -> None:
        """Let go of idle blocks of the CPU until ``nbytes`` more fit.

        Storages of the CPU come with memory of their own; those of a device take idle blocks.
        """
        for (device, padded), blocks in self._idle.items():
            while device.type == "cpu" and blocks and self._is_too_much(nbytes):
                blocks.pop()
                self._unused_bytes -= padded

    def settle(self) -> None:
        """Make blocks idle whose copies are over."""
        while self._uploads and self._uploads[0][0].query():
            _, device, block = self._uploads.popleft()
            self._unused_bytes -= block.nbytes
            self.give_back(block, device)

    def clear(self) -> None:
        """Let go of what nobody uses; pinned memory waits for its copies."""
        self._idle.clear()
        self._uploads.clear()
        self._unused_bytes = 0

    def _is_too_much(self, nbytes: int) -> bool:
        limit = 2 * self._most if self._budget is None else self._budget
        return self.nbytes + nbytes > limit
