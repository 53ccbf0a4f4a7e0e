"""How many cores this process may really use.

Three things narrow it: the CPU affinity, a cgroup's quota (containers), and the other ranks
on the same machine. OMP_NUM_THREADS is not asked: torchrun sets it to 1 for every rank.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tensorstow.base.errors import OptionError

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> int:
    """Return this rank's share of the cores that the process may run on, at least 1."""
    cores = affinity_cores()
    quota = quota_cores(root)
    if quota is not None:
        # Rounded down: a thread beyond the quota is not slower, it is stopped mid-chunk.
        cores = min(cores, int(quota))
    return max(1, cores // local_ranks(environ))


def affinity_cores() -> int:
    """Return the number of cores in this process's affinity mask."""
    return len(os.sched_getaffinity(0))


def local_ranks(environ: Mapping[str, str]) -> int:
    """Return how many ranks share this machine, as torchrun tells them (LOCAL_WORLD_SIZE)."""
    text = environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        message = (
            f"LOCAL_WORLD_SIZE={text!r} in the environment is not a number of ranks."
            " Set it to 1 or more, or unset it."
        )
        raise OptionError(message)
    return int(text)


def quota_cores(root: Path = _ROOT) -> float | None:
    """Return the cores' worth of CPU time that cgroups allow, or None where nothing limits it.

    ``root`` holds ``proc/self/cgroup`` and ``sys/fs/cgroup``.
    """
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield every cgroup above this process, v1 and v2: each one may set a quota."""
    mount = root / "sys/fs/cgroup"
    for line in _read_or_empty(root / "proc/self/cgroup").splitlines():
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
    words = _read_or_empty(folder / "cpu.max").split()
    if not words:
        words = [
            _read_or_empty(folder / f"cpu.cfs_{word}_us").strip() for word in ("quota", "period")
        ]
    match words:
        case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            return int(quota) / int(period)
        case _:  # "max", "-1", or no such file
            return None


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
