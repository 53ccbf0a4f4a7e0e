"""Runs of several ranks whose directories are lost say so, and go on in another place together."""

from collections.abc import Callable
from pathlib import Path

from ranks.durable import lost_and_gone_on, resumed, undisturbed
from ranks.pool import Ranks

Pools = Callable[[int], Ranks]


def task_undisturbed() -> dict[str, str]:
    return undisturbed(5)


def test_all_go_on_elsewhere(tmp_path: Path, ranks: Pools) -> None:
    wanted = ranks(2).run(task_undisturbed)
    ends = ranks(2).run(lost_and_gone_on, tmp_path / "run", tmp_path / "other", [0, 1])
    for (said, step, facts), right in zip(ends, wanted, strict=True):
        assert [each.partition(":")[0] for each in said] == ["UnlinkedError"]
        assert (step, facts) == (4, right)


def test_a_rank_that_lost_its_own_ends_all(tmp_path: Path, ranks: Pools) -> None:
    ends = ranks(2).run(lost_and_gone_on, tmp_path / "run", tmp_path / "other", [1])
    told = [[each.partition(":")[0] for each in said] for said, _, _ in ends]
    assert told == [["RankError", "PoisonedError"], ["UnlinkedError", "RankError"]]
    ((said, _, _), _) = ends
    assert "Rank 1 failed at the commit of step 3: UnlinkedError: The run commits to" in said[0]
    (tmp_path / "run" / "gone-1").rename(tmp_path / "run" / "rank-1-of-2")
    assert [step for step, _ in ranks(2).run(resumed, tmp_path / "run")] == [2, 2]
