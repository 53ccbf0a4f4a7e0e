"""`tensorstow plan` of a model of 70B from its configuration: seconds and memory of the process.

No profile is read: rates of a machine would make it another search.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.measure import Figure, Sample, Settings, at_most, not_available

_BUDGET = ("--device", "24GiB", "--host", "64GiB", "--disk", "1TiB")
_WAYS = {"--batch 1 --seq 2048": ("--batch", "1", "--seq", "2048"), "without a batch": ()}
_SECONDS, _BYTES = 5, 1 << 30


def figures(settings: Settings) -> Iterator[Figure]:
    """Run the command with a batch and without."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("plan command", None, "transformers is not installed")
        return
    model = "gpt2" if settings.quick else "llama-3-70b"
    for name, options in _WAYS.items():
        runs = [_run("plan", model, *_BUDGET, *options) for _ in range(settings.pairs)]
        sample = Sample(tuple(seconds for seconds, _ in runs))
        detail = {"seconds": sample.summary()}
        yield Figure(f"plan {model}, {name}", at_most(_SECONDS), sample.median, "s", detail)
        gib = max(nbytes for _, nbytes in runs) / _BYTES
        yield Figure(f"plan {model}, {name}: resident memory", at_most(1), gib, "GiB")


def _run(*arguments: str) -> tuple[float, int]:
    """Return the seconds that the command took, and the most memory that was resident.

    The latter is this process's own where that is more: the system counts from the fork on.
    """
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, "XDG_CACHE_HOME": empty}
        start = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "tensorstow", *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(child.pid, 0)
        elapsed = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, child.args)
    return elapsed, used.ru_maxrss << 10
