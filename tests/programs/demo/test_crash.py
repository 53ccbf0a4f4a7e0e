"""A run that is killed at any moment and started again is the run that nobody killed."""

from pathlib import Path

import pytest
import torch

from crash.aims import MOMENTS, UNDONE, UNDONE_ON_DISK
from crash.attempts import KillPoint, random_kill_points, run_killed, undone_moments
from crash.cases import CASES
from crash.world import Case
from tensorstow.base.update_on import Overlap


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def name_of(case: Case) -> str:
    parts = (case.overlap, case.state_format, case.commit_every, case.ram_budget, case.pin_every)
    return "-".join(str(part) for part in (*parts, case.parameters))


@pytest.mark.parametrize(("seed", "case"), list(enumerate(CASES)), ids=list(map(name_of, CASES)))
def test_killed_at_random(seed: int, case: Case, tmp_path: Path) -> None:
    kill_points = random_kill_points(seed, 4, undone_moments(case))
    history = run_killed(case, kill_points, tmp_path)
    assert history.wrong == []


@pytest.mark.parametrize(("number", "moment"), list(enumerate(MOMENTS)), ids=list(MOMENTS))
def test_killed_at(number: int, moment: str, tmp_path: Path) -> None:
    """At the first and at a later time, and again in the attempt after that."""
    kills = 0
    for count in (1, 3):
        overlap: Overlap = ("none", "forward", "backward")[(number + count) % 3]
        on_disk = moment in UNDONE_ON_DISK
        clips = on_disk or moment in UNDONE
        overlap = "speculative" if clips else overlap
        case = Case(
            overlap,
            commit_every=2,
            ram_budget=None if on_disk else "1100KiB",
            pin_every=2,
            clips=clips,
            parameters="disk" if on_disk else None,
            steps=14,
        )
        begun = KillPoint(moment="behind the transaction", count=4)
        aimed = KillPoint(moment=moment, count=count)
        is_beginning = "new" in moment.split() or moment == "room for states"
        kill_points = [aimed, aimed] if is_beginning else [begun, aimed, aimed]
        directory = tmp_path / str(count)
        directory.mkdir()
        history = run_killed(case, kill_points, directory)
        assert history.wrong == []
        kills += history.kills - (not is_beginning)
    assert kills > 0
