"""A bounded ring of memory: allocated in any size, freed first in, first out."""

from collections import deque
from dataclasses import dataclass

import torch

from tensorstow.io.arena import Arena


@dataclass(eq=False, slots=True)
class RingBlock:
    """Bytes of the ring that are allocated to one piece."""

    offset: int
    region: torch.Tensor
    """The bytes, 1-D uint8."""
    released: bool = False

    @property
    def end(self) -> int:
        """Return the offset of its end."""
        return self.offset + self.region.numel()


class PieceRing:
    """``capacity`` bytes, freed in the order of allocation, so that there are no holes."""

    def __init__(self, capacity: int) -> None:
        """Map the memory; no page of it is touched yet."""
        self.capacity = capacity
        # A forked child must not share pages that the kernel may be writing to.
        self._arena = Arena(capacity, in_children=False) if capacity else None
        self._blocks: deque[RingBlock] = deque()
        self.high_water = 0
        """The most bytes from the first block to the last, so far."""

    def __bool__(self) -> bool:
        """Return whether any block is allocated."""
        return bool(self._blocks)

    def allocate(self, nbytes: int) -> RingBlock | None:
        """Allocate ``nbytes`` contiguous bytes; return None if there is no space now."""
        offset = self._gap(nbytes)
        if offset is None or self._arena is None:
            return None
        block = RingBlock(offset, self._arena.tensor(offset, nbytes, torch.uint8))
        self._blocks.append(block)
        self.high_water = max(self.high_water, sum(x.region.numel() for x in self._blocks))
        return block

    def free(self, block: RingBlock) -> None:
        """Free a block; its bytes can be used again once all older blocks are free."""
        block.released = True
        while self._blocks and self._blocks[0].released:
            self._blocks.popleft()

    def _gap(self, nbytes: int) -> int | None:
        if not self._blocks:
            return 0 if nbytes <= self.capacity else None
        first, end = self._blocks[0].offset, self._blocks[-1].end
        if self._blocks[-1].offset >= first:
            if self.capacity - end >= nbytes:
                return end
            return 0 if first >= nbytes else None
        return end if first - end >= nbytes else None
