"""Bytes held over time, in bounded memory."""

import time
from collections.abc import Callable, Mapping

import torch

from tensorstow.report.rss import PeriodicSampler, resident_bytes
from tensorstow.report.spans import Sample

_MOST = 2048


class Samples:
    """Samples at regular times; every second one is dropped when the limit is reached."""

    def __init__(self, most: int = _MOST) -> None:
        self.kept: list[Sample] = []
        self._most = most
        self._stride = 1
        self._count = 0

    def add(self, sample: Sample) -> None:
        """Add a sample; all but every n-th are dropped, n being the current stride."""
        if self._count % self._stride == 0:
            if len(self.kept) == self._most:
                self.kept = self.kept[::2]
                self._stride *= 2
            if self._count % self._stride == 0:
                self.kept.append(sample)
        self._count += 1


class MemorySampler(PeriodicSampler):
    """Samples the memory of a process in a thread: the process's, a device's, and named counts.

    Args:
        counts: Functions that return bytes held now, by name. They are called in the thread: each
            reads a number or two, and takes no lock.
    """

    def __init__(self, counts: Mapping[str, Callable[[], int]]) -> None:
        super().__init__("memory")
        self.counts: Mapping[str, Callable[[], int]] = {"process": resident_bytes, **counts}
        if torch.accelerator.is_available():
            self.counts = {**self.counts, "device": device_bytes}
        self.held: dict[str, Samples] = {name: Samples() for name in self.counts}

    def take(self) -> None:
        """Take a sample of everything now."""
        now = time.monotonic()
        for name, count in self.counts.items():
            self.held[name].add(Sample(now, count()))


def device_bytes() -> int:
    """Return the bytes that torch has allocated on the current accelerator."""
    return int(torch.accelerator.memory_allocated())
