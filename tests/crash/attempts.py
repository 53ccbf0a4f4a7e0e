"""A run that is killed and started again until it is done, and what became of it."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from crash.world import Case, differing, undisturbed

TESTS = Path(__file__).parents[1]
KILLED = -int(signal.SIGKILL)


@dataclass(frozen=True)
class KillPoint:
    """When an attempt of a run is killed, if it has not come to its end before."""

    delay: float | None = None
    """Seconds after its start."""
    moment: str = ""
    """One of aims.MOMENTS, the ``count``-th time."""
    count: int = 1
    slow_us: int = 0
    """What each write waits, so that writes are under way when it is killed."""


@dataclass
class RunHistory:
    """What happened to a run."""

    kills: int = 0
    resumed: list[int | None] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class ForkServer:
    """A process that has torch loaded, and forks a child for each attempt."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "crash.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, job: dict[str, object], delay: float | None) -> int:
        """Return the exit status of a child that does ``job`` and is killed after ``delay``."""
        child = int(self._say(json.dumps(job)))
        timer = threading.Timer(delay if delay is not None else 60.0, _kill, (child,))
        timer.start()
        try:
            return int(self._hear())
        finally:
            timer.cancel()
            timer.join()

    def close(self) -> None:
        self._process.communicate()

    def _say(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    process = ForkServer()
    try:
        yield process
    finally:
        process.close()


def _kill(child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def random_kill_points(seed: int, count: int) -> list[KillPoint]:
    """Return kills at any moment of an attempt, while writes take a little or no time."""
    dice = random.Random(seed)  # noqa: S311
    return [
        KillPoint(delay=dice.uniform(0.0, 0.35), slow_us=dice.choice((0, 0, 300, 2000)))
        for _ in range(count)
    ]


def run_killed(
    fork_server: ForkServer, case: Case, kill_points: Sequence[KillPoint], directory: Path
) -> RunHistory:
    """Kill a run at each of ``kill_points``, then let it come to its end; compare all of it."""
    history = RunHistory()
    for attempt, kill_point in enumerate([*kill_points, KillPoint()]):
        job = {
            "case": asdict(case),
            "directory": str(directory),
            "attempt": attempt,
            "moment": kill_point.moment,
            "count": kill_point.count,
            "slow_us": kill_point.slow_us,
        }
        status = fork_server.run(job, kill_point.delay)
        if status == KILLED:
            history.kills += 1
        elif status != 0:
            history.wrong.append(f"attempt {attempt} ({kill_point}) ended with status {status}")
            return history
    wanted = undisturbed(case.state_format or "split", case.steps)
    found = json.loads((directory / "facts").read_text(encoding="ascii"))
    history.wrong += differing(found, wanted[case.steps])
    _read_losses(directory / "losses", case, history)
    return history


def _read_losses(path: Path, case: Case, history: RunHistory) -> None:
    """Every step that was taken again had the same loss; no commit that was durable was lost."""
    losses: dict[int, str] = {}
    durable = 0
    every = case.commit_every if isinstance(case.commit_every, int) else 3
    by_hand = case.commit_every is None
    for line in path.read_text(encoding="ascii").splitlines():
        first, _, second = line.partition(" ")
        if first == "resumed":
            step = None if second == "None" else int(second)
            if (step or 0) < durable:
                history.wrong.append(f"resumed at {step}, and {durable} was durable")
            history.resumed.append(step)
            durable = max(durable, step or 0)
            continue
        if losses.setdefault(int(first), second) != second:
            history.wrong.append(f"step {first} had another loss the second time")
        if by_hand or isinstance(case.commit_every, int):
            # The commit of the step before has been waited for when this one is taken.
            durable = max(durable, (int(first) - 1) // every * every)
