"""A bounded run of memory, lent in pieces of any size, first in first out."""

from collections import deque
from dataclasses import dataclass

import torch

from tensorstow.io.arena import Arena


@dataclass(eq=False, slots=True)
class Lease:
    """Bytes of the ring that one piece has for a while."""

    offset: int
    region: torch.Tensor
    """The bytes, 1-D uint8."""
    released: bool = False

    @property
    def end(self) -> int:
        """Return the first byte behind it."""
        return self.offset + self.region.numel()


class Ring:
    """``capacity`` bytes. What is lent first comes free first, so there are no holes to search."""

    def __init__(self, capacity: int) -> None:
        """Map the memory; no page of it is touched yet."""
        self.capacity = capacity
        # A forked child must not share pages that the kernel may be writing to.
        self._arena = Arena(capacity, in_children=False) if capacity else None
        self._leases: deque[Lease] = deque()
        self.high_water = 0
        """The most bytes from the first lease to the last, so far."""

    def __bool__(self) -> bool:
        """Return whether anything is lent."""
        return bool(self._leases)

    def lend(self, nbytes: int) -> Lease | None:
        """Return ``nbytes`` in one run, or None where there is no room now."""
        offset = self._gap(nbytes)
        if offset is None or self._arena is None:
            return None
        lease = Lease(offset, self._arena.tensor(offset, nbytes, torch.uint8))
        self._leases.append(lease)
        self.high_water = max(self.high_water, sum(x.region.numel() for x in self._leases))
        return lease

    def give_back(self, lease: Lease) -> None:
        """Take the bytes back; they come free once all that was lent before is back."""
        lease.released = True
        while self._leases and self._leases[0].released:
            self._leases.popleft()

    def _gap(self, nbytes: int) -> int | None:
        if not self._leases:
            return 0 if nbytes <= self.capacity else None
        first, end = self._leases[0].offset, self._leases[-1].end
        if self._leases[-1].offset >= first:
            if self.capacity - end >= nbytes:
                return end
            return 0 if first >= nbytes else None
        return end if first - end >= nbytes else None
