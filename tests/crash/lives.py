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
class Death:
    """How one life of a run ends, if it does not come to the run's end before."""

    delay: float | None = None
    """Seconds after its start."""
    moment: str = ""
    """One of aims.MOMENTS, the ``count``-th time."""
    count: int = 1
    slow_us: int = 0
    """What each write waits, so that writes are under way when it dies."""


@dataclass
class Story:
    """What happened to a run."""

    kills: int = 0
    resumed: list[int | None] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Nursery:
    """The process that makes the children."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "crash.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def live(self, job: dict[str, object], delay: float | None) -> int:
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
def nursery() -> Iterator[Nursery]:
    process = Nursery()
    try:
        yield process
    finally:
        process.close()


def _kill(child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def random_deaths(seed: int, count: int) -> list[Death]:
    """Return deaths at any moment of a life, while writes take a little or no time."""
    dice = random.Random(seed)  # noqa: S311
    return [
        Death(delay=dice.uniform(0.0, 0.35), slow_us=dice.choice((0, 0, 300, 2000)))
        for _ in range(count)
    ]


def tell_story(nursery: Nursery, case: Case, deaths: Sequence[Death], directory: Path) -> Story:
    """Let a run die as often as ``deaths`` says, then live to its end; compare all of it."""
    story = Story()
    for life, death in enumerate([*deaths, Death()]):
        job = {
            "case": asdict(case),
            "directory": str(directory),
            "life": life,
            "moment": death.moment,
            "count": death.count,
            "slow_us": death.slow_us,
        }
        status = nursery.live(job, death.delay)
        if status == KILLED:
            story.kills += 1
        elif status != 0:
            story.wrong.append(f"life {life} ({death}) ended with status {status}")
            return story
    wanted = undisturbed(case.state_format or "split", case.steps)
    found = json.loads((directory / "facts").read_text(encoding="ascii"))
    story.wrong += differing(found, wanted[case.steps])
    _read_losses(directory / "losses", case, story)
    return story


def _read_losses(path: Path, case: Case, story: Story) -> None:
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
                story.wrong.append(f"resumed at {step}, and {durable} was durable")
            story.resumed.append(step)
            durable = max(durable, step or 0)
            continue
        if losses.setdefault(int(first), second) != second:
            story.wrong.append(f"step {first} had another loss the second time")
        if by_hand or isinstance(case.commit_every, int):
            # The commit of the step before has been waited for when this one is taken.
            durable = max(durable, (int(first) - 1) // every * every)
