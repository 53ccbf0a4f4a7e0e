"""The CPU time that other programs used on this process's cores."""

import os
import resource
import time
from pathlib import Path

from tensorstow.base.cores import affinity_cores, quota_cores

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of a line of /proc/stat: user, nice, system, irq, softirq, steal."""


class OtherLoad:
    """The load of other programs since its creation."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._start = time.monotonic()
        self._busy, self._ours = busy_seconds(stat), our_seconds()

    def share(self) -> float | None:
        """Return the share of the cores that other programs used; all our children must have ended.

        None under a cgroup's quota, which counts other cores too, and if the kernel has no
        figures.
        """
        busy = busy_seconds(self._stat)
        if quota_cores() is not None or busy is None or self._busy is None:
            return None
        theirs = (busy - self._busy) - (our_seconds() - self._ours)
        wall = time.monotonic() - self._start
        return max(0.0, theirs / (wall * affinity_cores()))


def busy_seconds(stat: Path = _STAT) -> float | None:
    """Return how long the cores of this process have been busy; None: unknown."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    cores = [list(map(int, fields)) for name, *fields in filter(None, lines) if name in mine]
    if len(cores) < len(mine):
        return None
    ticks = sum(fields[column] for fields in cores for column in _BUSY)
    return ticks / os.sysconf("SC_CLK_TCK")


def our_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
