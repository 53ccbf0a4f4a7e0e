"""A run of two ranks, one of which is killed at any moment, is the run that nobody killed."""

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

import children
from ranks.kill_points import RANK_MOMENTS, WORLD, Case, KillPoint, jobs_of

KILLED = -9
COUNTS = {
    "a new store": 1,
    "a tensor of a commit written": 12,
    "weights half loaded": 1,
    "its generations are told": 1,
    "behind a pin": 2,
    "behind a drop": 1,
    "its word is left": 8,
}
RESUMING = {"weights half loaded"}


def run_ranks(case: Case, kill_point: KillPoint, directory: Path, attempt: int) -> list[int]:
    """Return how each rank ended."""
    jobs = json.dumps(jobs_of(case, kill_point, directory, attempt))
    statuses: list[int] = json.loads(children.run("-m", "ranks.kill_points", jobs).stdout)
    return statuses


Wanted = Callable[[int], list[dict[str, str]]]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """Return what each rank has behind so many steps in RAM that nothing happens to."""

    @cache
    def get(steps: int) -> list[dict[str, str]]:
        directory = tmp_path_factory.mktemp("undisturbed")
        assert run_ranks(Case(steps=steps), KillPoint(), directory, -1) == [0, 0]
        return facts_in(directory)

    return get


def facts_in(directory: Path) -> list[dict[str, str]]:
    return [
        json.loads((directory / f"facts-{rank}").read_text(encoding="ascii"))
        for rank in range(WORLD)
    ]


def kill(case: Case, kill_points: Sequence[KillPoint], directory: Path) -> int:
    """Let ranks die, then live to the end; return how many were killed."""
    kills, durable = 0, 0
    for attempt, kill_point in enumerate([*kill_points, KillPoint()]):
        statuses = run_ranks(case, kill_point, directory, attempt)
        kills += KILLED in statuses
        is_killed = statuses[kill_point.rank] == KILLED
        assert is_killed or (statuses == [0, 0] and not kill_point.moment), (
            f"attempt {attempt}, {kill_point}: {statuses}"
        )
        durable = check_told(directory, case, durable)
    return kills


def check_told(directory: Path, case: Case, durable: int) -> int:
    """Both ranks went on at one step, behind all that was durable; return what is now."""
    resumed, reached = set(), [durable]
    for rank in range(WORLD):
        path = directory / f"told-{rank}"
        for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
            word, number = line.split()
            step = 0 if number == "None" else int(number)
            if word == "resumed":
                resumed.add(step)
                assert step >= durable
            else:
                # Its commit has been waited for, by all ranks, when the next step is over.
                reached.append((step - 1) // case.commit_every * case.commit_every)
        path.unlink(missing_ok=True)
    assert len(resumed) <= 1
    return max(reached)


@pytest.mark.parametrize(
    ("number", "moment"), list(enumerate(RANK_MOMENTS)), ids=list(RANK_MOMENTS)
)
def test_killed_at(number: int, moment: str, tmp_path: Path, wanted: Wanted) -> None:
    case = Case(1 + number % 2, ("none", "forward")[number // 2 % 2], pin_every=4)
    grace = (0.0, 0.05)[number // 4 % 2]
    kill_point = KillPoint(number % WORLD, moment=moment, count=COUNTS.get(moment, 4), grace=grace)
    before = [KillPoint(moment="behind the transaction", count=5)] if moment in RESUMING else []
    assert kill(case, [*before, kill_point], tmp_path) == len(before) + 1
    assert facts_in(tmp_path) == wanted(case.steps)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random(seed: int, tmp_path: Path, wanted: Wanted) -> None:
    dice = random.Random(seed)  # noqa: S311
    kill_points = [
        KillPoint(
            dice.randrange(WORLD), delay=dice.uniform(0.0, 0.15), grace=dice.uniform(0.0, 0.1)
        )
        for _ in range(3)
    ]
    case = Case(1 + seed, "backward", pin_every=2 * seed, steps=30)
    assert kill(case, kill_points, tmp_path) > 0
    assert facts_in(tmp_path) == wanted(case.steps)
