"""Chooses the units whose copies stay on the device from forward to backward, by free memory.

[Note: Device cache] A unit in host memory is copied to the device for its forward and again for its
backward. If the device has free memory, the first copy stays and serves both. The free memory
depends on activations and is measured: at the end of each step the peak of allocated bytes is read,
copies that stay are subtracted, and the rest of the limit is available to them. The first step
creates the optimizer's states, and the second is the first that has them from its beginning: so two
steps keep none, the third keeps as many as fit, and a step with a higher peak (a longer batch)
reduces them. Each change is logged. Caches of several models on one device count each other's
copies. Ranks decide alone, as copies over a rank's own link are no collective.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from tensorstow.base.sizes import format_bytes

logger = logging.getLogger("tensorstow")

T = TypeVar("T")
_STEPS = 2
"""Steps that are measured before the first choice."""
_CACHES: "weakref.WeakSet[DeviceCache[Any]]" = weakref.WeakSet()
"""The caches of all models, which share a device's memory."""


class DeviceCache(Generic[T]):
    """Chooses the units whose copies stay, of those that are added."""

    def __init__(self, device: torch.device, limit_bytes: int, held: Callable[[], int]) -> None:
        """Choose none yet.

        Args:
            device: The device.
            limit_bytes: Copies stay while torch's allocated bytes are below this limit.
            held: Returns the bytes that copies that stay hold now.
        """
        self._device = device
        self._limit_bytes = limit_bytes
        self._held = held
        self._sizes: dict[T, int] = {}
        self._chosen: set[T] = set()
        self._steps = 0
        self._peak_bytes = 0
        self._other_bytes: int | None = None
        """The highest peak of everything but the copies; None: not measured yet."""
        _CACHES.add(self)

    def add(self, unit: T, nbytes: int) -> None:
        """Add a unit whose copy has ``nbytes``, in the order in which a forward uses them."""
        self._sizes[unit] = nbytes

    def __contains__(self, unit: T) -> bool:
        """Return whether the unit's copy stays."""
        return unit in self._chosen

    @property
    def chosen_bytes(self) -> int:
        """Return the bytes of the copies that stay, once all are made."""
        return sum(self._sizes[unit] for unit in self._chosen)

    def assume(self, other_bytes: int) -> None:
        """Choose by assumed bytes of everything but the copies, until steps are measured."""
        self._choose(other_bytes, "assumed")

    def measure(self) -> None:
        """Choose by torch's peak of allocated bytes, at the end of a step."""
        self._steps += 1
        peak = torch.accelerator.max_memory_allocated(self._device)
        # torch's peak is that of the whole run: a step has changed it only if it is higher now.
        if self._steps < _STEPS or peak <= self._peak_bytes:
            return
        self._peak_bytes = peak
        other = peak - sum(c._held() for c in self._caches_on_device())  # noqa: SLF001  # its own kind
        if self._other_bytes is None or other > self._other_bytes:
            self._other_bytes = other
            self._choose(other, "measured")

    def _caches_on_device(self) -> "list[DeviceCache[Any]]":
        """Return all caches on the device, including this one."""
        return [cache for cache in _CACHES if cache._device == self._device]  # noqa: SLF001

    def _choose(self, other_bytes: int, how: str) -> None:
        # Copies that other caches have chosen count, even if they are not made yet.
        theirs = sum(cache.chosen_bytes for cache in self._caches_on_device() if cache is not self)
        room, chosen = self._limit_bytes - other_bytes - theirs, set[T]()
        for unit, nbytes in self._sizes.items():
            if nbytes <= room:
                chosen.add(unit)
                room -= nbytes
        before, self._chosen = self._chosen, chosen
        if chosen != before:
            logger.info(
                "copies of %d of %d units stay on the device from forward to backward (%s; before:"
                " %d units): everything else takes %s of the limit of %s, as %s",
                len(chosen),
                len(self._sizes),
                format_bytes(self.chosen_bytes),
                len(before),
                format_bytes(other_bytes + theirs),
                format_bytes(self._limit_bytes),
                how,
            )
