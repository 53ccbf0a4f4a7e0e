"""Runs of several ranks: a store for each, and commits that all of them have."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.durable import (
    after_an_earlier_snapshot,
    ended,
    in_two_lives,
    refused,
    steps_committed,
    stowed_in_two_lives,
    undisturbed,
    with_a_failing_rank,
    with_snapshots,
)
from ranks.pool import Ranks
from ranks.resharded import go_on, push_while_live, snapshot_to, warnings_of_resume
from tensorstow import AdamW, Plan, Tier
from tensorstow.base.errors import OptionError
from tensorstow.cli.main import main
from tensorstow.store.upload_notes import read_notes, write_note

Pools = Callable[[int], Ranks]
RESUMED: list[dict[str, Any]] = [
    {"commit_every": 2},
    {"commit_every": 1, "overlap": "forward"},
    {"commit_every": 2, "overlap": "backward"},
    {"commit_every": 2, "dtype": torch.float32, "ram_budget": "1100KiB"},
]


def task_in_two_lives(directory: Path, given: dict[str, Any]) -> tuple[int | None, dict[str, str]]:
    return in_two_lives(directory, 5, 8, **given)


def task_undisturbed(given: dict[str, Any]) -> dict[str, str]:
    return undisturbed(8, **given)


@pytest.mark.parametrize("given", RESUMED, ids=str)
def test_a_run_goes_on_where_all_ranks_can(
    tmp_path: Path, ranks: Pools, given: dict[str, Any]
) -> None:
    alike = {key: value for key, value in given.items() if key == "dtype"}
    wanted = ranks(2).run(task_undisturbed, alike)
    found = ranks(2).run(task_in_two_lives, tmp_path / "run", given)
    assert [step for step, _ in found] == [5 // given["commit_every"] * given["commit_every"]] * 2
    assert [facts for _, facts in found] == wanted
    inside = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert inside == ["rank-0-of-2", "rank-1-of-2"]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(parameters=Tier.HOST, states=Tier.DISK),
        Plan(parameters=Tier.DISK, states=Tier.DISK),
        Plan(parameters=Tier.DEVICE, states=Tier.DISK, stage=0),
        Plan(parameters=Tier.HOST, states=Tier.HOST, replicas=2),
    ],
    ids=str,
)
def test_a_stowed_model_goes_on(tmp_path: Path, ranks: Pools, plan: Plan) -> None:
    assert (
        ranks(2).run(stowed_in_two_lives, tmp_path / "run", plan) == [(5, [])] * 2
    )  # which close() has committed


def test_one_rank_keeps_the_directory_itself(tmp_path: Path, ranks: Pools) -> None:
    ((step, _),) = ranks(1).run(task_in_two_lives, tmp_path / "run", {"commit_every": 2})
    assert step == 4
    assert (tmp_path / "run" / "manifest.sqlite").exists()


def test_rank_0_decides_by_its_clock(tmp_path: Path, ranks: Pools) -> None:
    first, second = ranks(2).run(steps_committed, tmp_path / "run", 30)
    dice = random.Random(0)  # noqa: S311
    assert first == second == [step for step in range(1, 31) if dice.random() < 0.4]


@pytest.mark.parametrize("where", ["commit", "write_tensor", "extra_now", "step"])
def test_a_rank_that_cannot_commit_fails_all(tmp_path: Path, ranks: Pools, where: str) -> None:
    first, second = ranks(2).run(with_a_failing_rank, tmp_path / "run", where, 6)
    assert first[0] == "RankError"
    assert "Rank 1 failed at the commit of step 4: CommitError: no room" in first[1]
    assert second[:2] == ("CommitError", "no room")
    assert (first[2], second[2]) == (2, 2)


def test_snapshots_are_of_all_ranks(tmp_path: Path, ranks: Pools) -> None:
    for found in ranks(2).run(with_snapshots, tmp_path / "run"):
        assert found == [[("two",), ("four",)], 2, True, [("two",)]]


@pytest.mark.parametrize("fails_on", [None, 0, 1])
def test_decisions_of_later_steps_do_not_count_after_an_earlier_snapshot(
    tmp_path: Path, ranks: Pools, fails_on: int | None
) -> None:
    assert ranks(2).run(after_an_earlier_snapshot, tmp_path / "run", fails_on) == [2, 2]


def test_another_number_of_ranks_must_resume(tmp_path: Path, ranks: Pools) -> None:
    ranks(2).run(task_in_two_lives, tmp_path / "run", {"commit_every": 2})
    for act in ("commit", "step"):
        for told in ranks(1).run(refused, tmp_path / "run", act):
            assert told.startswith("OptionError:")
            assert "run of 1 rank, and it holds one of 2 ranks. Call resume()" in told
    other = AdamW([torch.nn.Parameter(torch.ones(3))], states="disk", dir=tmp_path / "other")
    with other, pytest.raises(OptionError, match="holds one of 2 ranks"):
        other.commit_to(tmp_path / "run")


@pytest.mark.parametrize(
    ("way", "raised", "step"),
    [
        ("close", ["", ""], 3),
        ("drop", ["", ""], None),
        ("raises", ["RankError", "ValueError"], None),
    ],
)
def test_an_end_commits_where_all_ranks_close(
    tmp_path: Path, ranks: Pools, way: str, raised: list[str], step: int | None
) -> None:
    found = ranks(2).run(ended, tmp_path / "run", way)
    assert found == [(raised[0], step), (raised[1], step)]


def test_all_ranks_copy_theirs(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    url = str(tmp_path / "bucket")
    wanted, _ = ranks(2).run(snapshot_to, tmp_path / "run", url)
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    ((start, before, _),) = ranks(1).run(go_on, tmp_path / "back", 1, "two", {})
    assert (start, before) == (2, wanted)


def test_each_machine_pulls_its_rank(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    url = str(tmp_path / "bucket")
    ranks(2).run(snapshot_to, tmp_path / "run", url)
    for rank in ("0", "1"):
        assert main(["run", "pull", url, str(tmp_path / "back"), "--rank", rank]) == 0
    assert [start for start, _, _ in ranks(2).run(go_on, tmp_path / "back", 1, None, {})] == [2, 2]


def test_ranks_are_pushed_when_the_run_is_over(
    tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    url = str(tmp_path / "bucket")
    (_, _, wanted), _ = ranks(2).run(go_on, tmp_path / "run", 2, None, {})
    assert main(["run", "push", str(tmp_path / "run"), url]) == 0
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    ((start, before, _),) = ranks(1).run(go_on, tmp_path / "back", 0, None, {})
    assert (start, before) == (2, wanted)


def test_the_command_pushes_a_live_run_of_all_ranks(
    tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    url = str(tmp_path / "bucket")
    wanted, _ = ranks(2).run(push_while_live, tmp_path / "run", url)
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    ((start, before, _),) = ranks(1).run(go_on, tmp_path / "back", 0, None, {})
    assert (start, before) == (2, wanted)


def test_copies_of_ranks_that_are_no_more_are_said_with_the_command(
    tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    url, store = str(tmp_path / "bucket"), tmp_path / "run" / "rank-1-of-2"
    ranks(2).run(snapshot_to, tmp_path / "run", str(tmp_path / "other"))
    write_note(store, "two", url)
    (said,) = ranks(1).run(warnings_of_resume, tmp_path / "run")
    command = f"run push {tmp_path / 'run'} {url} --snapshot two"
    assert f"when the run of 2 ranks ended: tensorstow {command}" in said
    assert main(command.split()) == 0
    assert read_notes(store) == {}
    assert main(["run", "scrub", url]) == 0
