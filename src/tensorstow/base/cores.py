"""Which cores this process may use, by its affinity and its cgroup.

Two things narrow it: the CPU affinity and a cgroup's quota (containers). Other ranks on the same
machine have their part of them (io/local_share.py).
"""

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def process_cores(root: Path = _ROOT) -> int:
    """Return how many cores the process may use, at least 1, other ranks not regarded."""
    return within_quota(affinity_cores(), root)


def within_quota(cores: int, root: Path = _ROOT) -> int:
    """Return how many of so many cores a cgroup's quota lets run all the time, at least 1."""
    quota = quota_cores(root)
    # Rounded down: a thread beyond the quota is not slower, it is stopped mid-chunk.
    return cores if quota is None else max(1, min(cores, int(quota)))


def affinity_cores() -> int:
    """Return the number of cores in this process's affinity mask."""
    return len(os.sched_getaffinity(0))


def launcher_cores() -> frozenset[int]:
    """Return the cores that the process which started this one may use; empty: not known."""
    parent = os.getppid()
    if parent == 0:  # it is outside of this container
        return frozenset()
    try:
        return frozenset(os.sched_getaffinity(parent))
    except OSError:  # it has ended
        return frozenset()


def quota_cores(root: Path = _ROOT) -> float | None:
    """Return the cores' worth of CPU time that cgroups allow, or None if nothing limits it.

    ``root`` holds ``proc/self/cgroup`` and ``sys/fs/cgroup``.
    """
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield every cgroup above this process, v1 and v2: each one may set a quota."""
    mount = root / "sys/fs/cgroup"
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, inside = line.split(":", maxsplit=2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has no controller name and one tree, which hybrid systems mount one deeper.
        trees = [mount / "cpu", mount / controllers] if controllers else [mount, mount / "unified"]
        # A container may see its host's path here and none of it below the mount: folders
        # that do not exist are skipped by the reader, the mount itself is always asked.
        parts = [part for part in Path(inside).parts if part not in {"/", ".."}]
        for tree in trees:
            for depth in range(len(parts), -1, -1):
                yield tree.joinpath(*parts[:depth])


def _quota_of(folder: Path) -> float | None:
    """Read one cgroup's quota, in cores."""
    words = read_or_empty(folder / "cpu.max").split()
    if not words:
        words = [
            read_or_empty(folder / f"cpu.cfs_{word}_us").strip() for word in ("quota", "period")
        ]
    match words:
        case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            return int(quota) / int(period)
        case _:  # "max", "-1", or no such file
            return None


def read_or_empty(path: Path) -> str:
    """Return the text of a file of the kernel's; empty if this system does not have it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
