"""Runs all configurations, each in its own process, in turns of a few steps.

Turns make load on the machine affect all of them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from demo.configurations import FOLDER, TURN_STEPS, Configuration, ModelSize
from demo.result import RunResult
from tensorstow.cli.process import Process, started

Announce = Callable[[Configuration, int, str], None]
"""Called with a row, the step and the part of it that begins."""
_ROOT = Path("/")
_WORKER = "demo.worker"


class Runner:
    """One configuration in its process."""

    def __init__(self, row: Configuration, process: Process, announce: Announce) -> None:
        self._row = row
        self._process = process
        self._messages = process.messages()
        self._announce = announce

    def until_it_waits(self) -> None:
        """Read its messages until its turn is over."""
        for said in self._messages:
            if "waits" in said:
                return
            self._announce(self._row, said["step"], said["part"])

    def take(self, steps: int) -> None:
        """Make it take ``steps`` steps."""
        self._process.tell(str(steps))
        self.until_it_waits()

    def tell_to_finish(self) -> None:
        """End its turns."""
        self._process.tell_no_more()

    def result(self) -> RunResult:
        """Wait until it ends; return its result."""
        last: dict[str, Any] = {}
        for last in self._messages:
            if "part" in last:
                self._announce(self._row, last["step"], last["part"])
        return RunResult.of(last)


def run_rows(
    rows: Sequence[Configuration],
    steps: int,
    arguments: Sequence[str],
    announce: Announce,
    *,
    at_once: bool,
) -> list[RunResult]:
    """Run ``rows`` in turns if all fit ``at_once``, else one after the other."""
    turns = turns_of(steps)
    results: list[RunResult] = []
    for company in [rows] if at_once else [[row] for row in rows]:
        with ExitStack() as stack:
            runners = [_start(row, arguments, announce, stack) for row in company]
            for runner in runners:
                runner.until_it_waits()  # all build at the same time
            for number, count in enumerate(turns):
                # Turns alternate the order, so that a drift, such as heat, affects all rows alike.
                for runner in runners if number % 2 == 0 else reversed(runners):
                    runner.take(count)
            for runner in runners:
                runner.tell_to_finish()
            results += [runner.result() for runner in runners]
    return results


def turns_of(steps: int) -> list[int]:
    """Return the number of steps of each turn."""
    whole, rest = divmod(steps, TURN_STEPS)
    return [TURN_STEPS] * whole + [rest] * (rest > 0)


def fits_at_once(scale: ModelSize, free_disk_bytes: int, root: Path = _ROOT) -> bool:
    """Return whether all configurations fit in RAM and on disk at the same time."""
    available = available_bytes(root)
    ram = available is None or available >= scale.rows_ram_bytes
    return ram and free_disk_bytes >= scale.rows_disk_bytes


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return the RAM that is available: the machine's, or a cgroup's if that is less."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    limits = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    group = root / "sys/fs/cgroup"  # in a container, that of the container
    try:
        limit, used = (
            (group / name).read_text(encoding="ascii").strip()
            for name in ("memory.max", "memory.current")
        )
        limits += [int(limit) - int(used)] if limit != "max" else []
    except OSError:
        pass
    return min(limits, default=None)


def _start(
    row: Configuration, arguments: Sequence[str], announce: Announce, stack: ExitStack
) -> Runner:
    process = stack.enter_context(
        started(row.name, _WORKER, ["--row", row.key, *arguments], FOLDER)
    )
    return Runner(row, process, announce)
