"""Which units' copies stay on the device from forward to backward, by the memory that is free.

[Note: Device cache] A unit in host memory or on disk is copied to the device for its forward and
again for its backward. Where the device has room, the first copy stays and serves both. How much
room there is depends on activations, which only a run can tell: at the end of each step the most
that was allocated is read, copies that stay are subtracted, and what is left of the limit is room
for them. So the first step keeps none, the second as many as fit, and a step that needed more (a
longer batch) makes them fewer. Each change is logged. Ranks decide alone: what is copied over a
rank's own link is no collective.
"""

import logging
from typing import Generic, TypeVar

import torch

from tensorstow.base.sizes import format_bytes

logger = logging.getLogger("tensorstow")

T = TypeVar("T")


class DeviceCache(Generic[T]):
    """Chooses the units whose copies stay, of those that are added."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        """Choose none yet.

        Args:
            device: The device.
            limit_bytes: What torch may have allocated there for copies to stay.
        """
        self._device = device
        self._limit_bytes = limit_bytes
        self._sizes: dict[T, int] = {}
        self._chosen: set[T] = set()
        self._peak_bytes = 0
        self._other_bytes: int | None = None
        """The most that everything else took; None: not measured yet."""

    def add(self, unit: T, nbytes: int) -> None:
        """Take a unit, behind those that a forward uses before it.

        Args:
            unit: The unit.
            nbytes: The bytes of its copy.
        """
        self._sizes[unit] = nbytes

    def __contains__(self, unit: T) -> bool:
        """Return whether the unit's copy stays."""
        return unit in self._chosen

    def assume(self, other_bytes: int) -> None:
        """Choose by an assumption, until the first step is measured.

        Args:
            other_bytes: What everything but the copies takes of the device.
        """
        self._choose(other_bytes, "assumed")

    def measure(self, held_bytes: int) -> None:
        """Choose by what torch has allocated at most. At the end of a step.

        Args:
            held_bytes: What copies that stay hold now.
        """
        peak = torch.accelerator.max_memory_allocated(self._device)
        if peak <= self._peak_bytes:
            return
        self._peak_bytes = peak
        known = 0 if self._other_bytes is None else self._other_bytes
        if self._other_bytes is None or peak - held_bytes > known:
            self._other_bytes = max(known, peak - held_bytes)
            self._choose(self._other_bytes, "measured")

    def _choose(self, other_bytes: int, how: str) -> None:
        room, chosen = self._limit_bytes - other_bytes, set[T]()
        for unit, nbytes in self._sizes.items():
            if nbytes <= room:
                chosen.add(unit)
                room -= nbytes
        if chosen != self._chosen:
            logger.info(
                "copies of %d of %d units stay on the device from forward to backward (%s; before:"
                " %d units): everything else takes %s of the limit of %s, as %s",
                len(chosen),
                len(self._sizes),
                format_bytes(sum(self._sizes[unit] for unit in chosen)),
                len(self._chosen),
                format_bytes(other_bytes),
                format_bytes(self._limit_bytes),
                how,
            )
        self._chosen = chosen
