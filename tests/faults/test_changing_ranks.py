"""A run whose number of ranks changes goes on from its last commit, whenever a rank is killed."""

import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest

import children
from ranks.changing import CHANGES

KILLED = -9


class Life(NamedTuple):
    """How a life of the run ends."""

    world: int
    rank: int = 0
    moment: str = ""
    count: int = 1


def live(life: Life, directory: Path, number: int) -> list[int]:
    """Return how each rank ended."""
    common = {
        "directory": str(directory),
        "meeting": str(directory / f"meeting-{number}"),
        "world": life.world,
        "grace": 0.1,
        "delay": None,
    }
    jobs = [
        {
            **common,
            "rank": rank,
            "moment": life.moment if rank == life.rank else "",
            "count": life.count,
        }
        for rank in range(life.world)
    ]
    statuses: list[int] = json.loads(children.run("-m", "ranks.changing", json.dumps(jobs)).stdout)
    return statuses


def check_told(directory: Path, prints: dict[int, set[str]], durable: int) -> int:
    """Check what each rank went on with; return the last step that is durable.

    ``prints``: what each step came to, in each life that took it.
    """
    starts, reached = set(), [durable]
    for path in sorted(directory.glob("told-*")):
        for line in path.read_text(encoding="ascii").splitlines():
            word, step, value = line.split()
            if word == "resumed":
                starts.add(int(step))
                assert int(step) >= durable
                assert value in prints.setdefault(int(step), {value} if step == "0" else set())
            else:
                prints.setdefault(int(step), set()).add(value)
                reached.append(int(step) - 1)  # the step after it waits for its commit
        path.unlink()
    assert len(starts) <= 1
    return max(reached)


def go_through(lives: list[Life], directory: Path) -> int:
    """Let a run live and die; return how many lives came to the moment of their end."""
    prints: dict[int, set[str]] = {}
    durable = kills = 0
    for number, life in enumerate(lives):
        statuses = live(life, directory, number)
        is_killed = bool(life.moment) and statuses[life.rank] == KILLED
        assert is_killed or set(statuses) == {0}, f"life {number}, {life}: {statuses}"
        kills += is_killed
        durable = check_told(directory, prints, durable)
    stores = {path.parent.name for path in (directory / "run").rglob("manifest.sqlite")}
    last = lives[-1].world
    assert stores >= ({"run"} if last == 1 else {f"rank-{n}-of-{last}" for n in range(last)})
    assert len(prints) > 2 * sum(not life.moment for life in lives)
    return kills


@pytest.mark.parametrize("moment", list(CHANGES))
def test_killed_at(moment: str, tmp_path: Path) -> None:
    number = list(CHANGES).index(moment)
    before, after = ((2, 3), (1, 2), (3, 1))[number % 3]
    killed = Life(after, number % 2 if after > 1 else 0, moment)
    lives = [Life(before), killed, Life((after, before)[number % 2]), Life(2)]
    assert go_through(lives, tmp_path) == 1


@pytest.mark.soak
def test_killed_twenty_times(tmp_path: Path) -> None:
    dice = random.Random(28)  # noqa: S311
    lives = []
    for world in (1, 4, 2, 3, 8, 1):
        lives.append(Life(world))
        for _ in range(8):
            upcoming = dice.choice([n for n in (1, 2, 3, 4, 8) if n != lives[-1].world])
            moment = dice.choice(list(CHANGES))
            lives.append(Life(upcoming, dice.randrange(upcoming), moment))
    assert go_through([*lives, Life(3)], tmp_path) >= 20
