"""A run that is killed and started again until it is done, and what became of it."""

import json
import random
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import children
from crash.aims import UNDONE, UNDONE_ON_DISK
from crash.world import Case, differing, undisturbed

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


def attempt_run(job: dict[str, object], delay: float | None) -> int:
    """Return the exit status of a child that does ``job`` and is killed after ``delay``."""
    child = children.start("-m", "crash.child", json.dumps(job))
    with suppress(subprocess.TimeoutExpired):
        child.wait(60.0 if delay is None else delay)
    child.kill()
    return child.wait()


def random_kill_points(
    seed: int, count: int, moments: Sequence[str] = (), every: int = 2
) -> list[KillPoint]:
    """Return kills at any moment of an attempt, while writes take a little or no time.

    One of ``every`` so many is at one of ``moments``, if there are any.
    """
    dice = random.Random(seed)  # noqa: S311
    slow = (0, 0, 300, 2000)
    return [
        KillPoint(moment=dice.choice(moments), count=dice.randint(1, 4), slow_us=dice.choice(slow))
        if moments and number % every == every - 1
        else KillPoint(delay=dice.uniform(0.0, 0.35), slow_us=dice.choice(slow))
        for number in range(count)
    ]


def undone_moments(case: Case) -> tuple[str, ...]:
    """Return the moments of steps that may be undone, if those of ``case`` may."""
    if case.overlap != "speculative":
        return ()
    return (*UNDONE, *UNDONE_ON_DISK) if case.parameters == "disk" else UNDONE


def run_killed(case: Case, kill_points: Sequence[KillPoint], directory: Path) -> RunHistory:
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
        status = attempt_run(job, kill_point.delay)
        if status == KILLED:
            history.kills += 1
        elif status != 0:
            history.wrong.append(f"attempt {attempt} ({kill_point}) ended with status {status}")
            return history
    wanted = undisturbed(
        case.state_format or "split", case.steps, clips=case.clips, parameters=case.parameters
    )
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
