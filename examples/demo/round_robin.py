"""Runs all configurations, each in its own process, in turns of a few steps.

Turns make load on the machine affect all of them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from demo.configurations import FOLDER, TURN_STEPS, Configuration, ModelSize
from demo.result import RunResult
from tensorstow.cli.process import Process, started

Announce = Callable[[Configuration, int, str], None]
"""Called with a row, the step and the part of it that begins."""
_WORKER = "demo.worker"


class Runner:
    """One configuration in its process."""

    def __init__(self, row: Configuration, process: Process, announce: Announce) -> None:
        self._row = row
        self._process = process
        self._messages = process.messages()
        self._announce = announce

    def until_it_builds(self) -> None:
        """Read its first message: it has loaded its modules."""
        for said in self._messages:
            self._announce(self._row, said["step"], said["part"])
            return

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
            runners = []
            for row in company:
                options = ["--row", row.key, *arguments]
                process = stack.enter_context(started(row.name, _WORKER, options, FOLDER))
                runners.append(Runner(row, process, announce))
                if len(runners) == 1:  # modules are compiled once, not by each process
                    runners[0].until_it_builds()
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


def fits_at_once(scale: ModelSize, free_disk_bytes: int, free_bytes: int) -> bool:
    """Return whether all configurations fit in RAM and on disk at the same time."""
    return free_bytes >= scale.rows_ram_bytes and free_disk_bytes >= scale.rows_disk_bytes
