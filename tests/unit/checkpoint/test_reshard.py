"""A run that goes on with another number of ranks has the same states and weights, bit for bit."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.pool import RankError, Ranks
from ranks.resharded import (
    Facts,
    by_reference,
    fail_in_commit,
    go_on,
    go_on_over_files,
    go_on_stowed,
    go_on_tied,
    go_on_untrained,
    resume_twice,
    snapshot,
    told,
)
from tensorstow import AdamW, Plan
from tensorstow.store.inspect import open_contents
from tensorstow.store.records import chunk_shapes

Pools = Callable[[int], Ranks]
WORLDS = (1, 2, 3, 1)


def flip(path: Path, offset: int) -> None:
    """Change a bit of a file, or change it back."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def shared(facts: Facts) -> Facts:
    """Return what is the same on all ranks: buffers are each rank's own."""
    return {name: value for name, value in facts.items() if ".running" not in name}


def stores(directory: Path) -> list[str]:
    """Return the stores in a run's directory."""
    return sorted(path.parent.name for path in directory.rglob("manifest.sqlite"))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": torch.float32, "amsgrad": True, "overlap": "forward"},
        {"state_format": "split"},
        {"ema": 0.9},
        {"state_format": "bf16", "overlap": "backward"},
    ],
    ids=str,
)
def test_states_and_weights_are_the_same(
    tmp_path: Path, ranks: Pools, given: dict[str, Any]
) -> None:
    last: tuple[Facts, ...] = ()
    for number, world in enumerate(WORLDS):
        found = ranks(world).run(go_on, tmp_path / "run", 3, None, given)
        starts, before, after = zip(*found, strict=True)
        assert starts == ((3 * number or None),) * world
        for rank, facts in enumerate(before if last else ()):
            assert facts == last[rank % len(last)]  # whose buffers it takes
        last = after
        assert stores(tmp_path / "run") == (
            ["run"] if world == 1 else [f"rank-{rank}-of-{world}" for rank in range(world)]
        )


STAGES = [
    Plan(parameters="disk", states="disk"),
    Plan(parameters="host", states="host", stage=2),
    Plan(parameters="device", states="disk", stage=1),
    Plan(parameters="device", states="disk", stage=0),
]


@pytest.mark.parametrize("plan", STAGES, ids=str)
def test_stowed_models_go_on_in_another_placement(tmp_path: Path, ranks: Pools, plan: Plan) -> None:
    other = STAGES[(STAGES.index(plan) + 1) % len(STAGES)]
    last = None
    for world, placement in ((2, plan), (1, other), (3, plan), (2, other)):
        found = ranks(world).run(go_on_stowed, tmp_path / "run", 2, placement, {})
        _, before, after = zip(*found, strict=True)
        assert last is None or all(facts == last for facts in before)
        last = after[0]


def test_replicas_have_rows_several_times(tmp_path: Path, ranks: Pools) -> None:
    twice = Plan(parameters="host", states="disk", replicas=2)
    ((_, _, wanted), _) = ranks(2).run(go_on_stowed, tmp_path / "run", 2, twice, {})
    ((start, before, after),) = ranks(1).run(go_on_stowed, tmp_path / "run", 2, Plan(), {})
    assert (start, before) == (2, wanted)
    for start, before, _ in ranks(2).run(go_on_stowed, tmp_path / "run", 2, twice, {}):
        assert (start, before) == (4, after)


def test_int8_is_moved_in_whole_groups_alone(tmp_path: Path, ranks: Pools) -> None:
    plan = Plan(parameters="host", states="disk")
    given = {"state_format": "int8"}
    ((_, _, _), _) = ranks(2).run(go_on_stowed, tmp_path / "run", 2, plan, given)
    with pytest.raises(RankError, match=r"0\.0\.weight of the run .* rows that no 32 divides"):
        ranks(1).run(go_on_stowed, tmp_path / "run", 2, plan, given)


def test_a_snapshot_is_gone_back_to_and_stays(tmp_path: Path, ranks: Pools) -> None:
    run = tmp_path / "run"
    ranks(2).run(go_on, run, 2, None, {})
    wanted, _ = ranks(2).run(snapshot, run, "two")
    (said,) = ranks(1).run(told, run, "three")
    assert "The snapshot 'three' was requested" in said
    assert "Snapshots of 1 rank: none; of 2 ranks: two." in said
    ((start, before, _),) = ranks(1).run(go_on, run, 1, "two", {})
    assert (start, before) == (2, wanted)
    assert stores(run) == ["rank-0-of-2", "rank-1-of-2", "run"]
    # The newest commit is that of the single process, and goes back to the two of before.
    assert [start for start, _, _ in ranks(2).run(go_on, run, 0, None, {})] == [3, 3]
    assert stores(run) == ["rank-0-of-2", "rank-1-of-2"]
    for start, before, _ in ranks(3).run(go_on, run, 1, "two", {}):  # of older stores
        assert (start, shared(before)) == (2, shared(wanted))
    assert ranks(1).run(told, run, "two") == ["nothing was raised"]
    for start, _, _ in ranks(2).run(go_on, run, 1, "two", {}):  # of their own, which are older
        assert start == 2
    assert [start for start, _, _ in ranks(2).run(go_on, run, 0, None, {})] == [3, 3]


def test_what_followed_a_snapshot_is_the_newest(tmp_path: Path, ranks: Pools) -> None:
    """Its era is above that of what was abandoned, though the snapshot's is below."""
    run = tmp_path / "run"
    ranks(2).run(go_on, run, 2, None, {})
    ranks(2).run(snapshot, run, "a")
    ranks(1).run(go_on, run, 2, None, {})
    ranks(1).run(snapshot, run, "b")
    ranks(2).run(go_on, run, 3, None, {})
    ((start, _, wanted), _) = ranks(2).run(go_on, run, 1, "a", {})
    assert start == 2
    ((start, before, _), _) = ranks(2).run(go_on, run, 0, None, {})
    assert (start, before) == (3, wanted)
    ((start, _, wanted),) = ranks(1).run(go_on, run, 4, "a", {})
    assert start == 2
    ((start, before, _),) = ranks(1).run(go_on, run, 0, None, {})
    assert (start, before) == (6, wanted)


def test_a_look_at_a_snapshot_loses_nothing(tmp_path: Path, ranks: Pools) -> None:
    run = tmp_path / "run"
    ranks(2).run(go_on, run, 2, None, {})
    wanted, _ = ranks(2).run(snapshot, run, "a")
    ((_, _, newest),) = ranks(1).run(go_on, run, 3, None, {})
    assert ranks(2).run(told, run, "a") == ["nothing was raised"] * 2
    ((start, before, _),) = ranks(1).run(go_on, run, 0, None, {})
    assert (start, before) == (5, newest)
    assert ranks(3).run(told, run, "a") == ["nothing was raised"] * 3
    assert "run" in stores(run)
    for start, before, _ in ranks(2).run(go_on, run, 1, "a", {}):
        assert (start, shared(before)) == (2, shared(wanted))
    assert [start for start, _, _ in ranks(3).run(go_on, run, 0, None, {})] == [3, 3, 3]
    assert stores(run) == [
        "rank-0-of-2",
        "rank-0-of-3",
        "rank-1-of-2",
        "rank-1-of-3",
        "rank-2-of-3",
    ]


def test_a_lost_store_is_not_replaced_by_an_older_run(tmp_path: Path, ranks: Pools) -> None:
    run = tmp_path / "run"
    ranks(2).run(go_on, run, 2, None, {})
    ranks(2).run(snapshot, run, "a")
    ranks(3).run(go_on, run, 2, None, {})
    ((_, _, wanted), *_) = ranks(3).run(go_on, run, 1, None, {})
    (run / "rank-1-of-3").rename(tmp_path / "elsewhere")
    for said in ranks(3).run(told, run):
        assert said.startswith("RankError: The ranks have no commit in common")
    for said in ranks(2).run(told, run):
        assert "is of 3 ranks, and " in said  # whose second store is empty now
    shutil.rmtree(run / "rank-1-of-3")
    (tmp_path / "elsewhere").rename(run / "rank-1-of-3")
    for start, before, _ in ranks(3).run(go_on, run, 0, None, {}):
        assert (start, shared(before)) == (5, shared(wanted))


@pytest.mark.parametrize("given", [{}, {"state_format": "fp32"}], ids=str)
def test_states_of_untrained_weights_stay_blank(
    tmp_path: Path, ranks: Pools, given: dict[str, Any]
) -> None:
    last = None
    for number, world in enumerate((1, 2, 1)):
        found = ranks(world).run(go_on_untrained, tmp_path / "run", given)
        assert [start for start, _, _ in found] == [2 * number or None] * world
        assert last is None or all(before == last for _, before, _ in found)
        last = found[0][2]


def test_weights_that_never_moved_have_masters_of_their_values(
    tmp_path: Path, ranks: Pools
) -> None:
    """Their first update seeds masters, which are zero where a chunk has trained ones too."""
    given = {"state_format": "fp32"}
    ((_, _, wanted),) = ranks(1).run(go_on_untrained, tmp_path / "run", given)
    weights = {name: value for name, value in wanted.items() if "weight" in name}
    for world in (2, 3):
        task = partial(go_on_untrained, stand_still=True)
        for _, _, after in ranks(world).run(task, tmp_path / "run", given):
            assert {name: after[name] for name in weights} == weights


def test_tied_weights_and_groups(tmp_path: Path, ranks: Pools) -> None:
    last = None
    for number, world in enumerate((2, 1, 3, 2)):
        found = ranks(world).run(go_on_tied, tmp_path / "run", 2)
        assert [start for start, _, _ in found] == [2 * number or None] * world
        assert last is None or all(before == last for _, before, _ in found)
        last = found[0][2]


def test_a_run_that_was_put_beside_does_not_replace_its_own(tmp_path: Path, ranks: Pools) -> None:
    ((_, _, wanted),) = ranks(1).run(go_on, tmp_path / "run", 5, None, {})
    ranks(2).run(go_on, tmp_path / "other", 7, None, {})
    for rank in range(2):
        name = f"rank-{rank}-of-2"
        (tmp_path / "other" / name).rename(tmp_path / "run" / name)
    ((start, before, _),) = ranks(1).run(go_on, tmp_path / "run", 0, None, {})
    assert (start, before) == (5, wanted)


def test_the_commit_before_going_back_stays_by_its_number(tmp_path: Path, ranks: Pools) -> None:
    run = tmp_path / "run"
    ranks(2).run(go_on, run, 2, None, {})
    ranks(2).run(snapshot, run, "a")
    ((_, _, wanted),) = ranks(1).run(go_on, run, 3, None, {})
    with open_contents(run, "A test") as contents:
        number = contents.generations[-1].number
    assert ranks(1).run(told, run, "a") == ["nothing was raised"]
    ((start, before, _),) = ranks(1).run(go_on, run, 0, number, {})
    assert (start, before) == (5, wanted)


def test_frozen_weights_in_files_are_compared(tmp_path: Path, ranks: Pools) -> None:
    last = None
    for number, world in enumerate((1, 2, 3)):
        found = ranks(world).run(go_on_over_files, tmp_path / "run", tmp_path, 0.0)
        assert [start for start, _, _ in found] == [number or None] * world
        assert last is None or all(before == last for _, before, _ in found)
        last = found[0][2]
    for said in ranks(3).run(go_on_over_files, tmp_path / "run", tmp_path, 1.0):
        assert "has other values than in the run that is stored here" in said or "Rank" in said


def test_resuming_again_finds_no_old_stores(tmp_path: Path, ranks: Pools) -> None:
    for world in (2, 3, 1, 2):
        assert ranks(world).run(resume_twice, tmp_path / "empty") == [[None, None]] * world
        ranks(world).run(go_on, tmp_path / "run", 1, None, {})
        assert all(
            len(set(steps)) == 1 for steps in ranks(world).run(resume_twice, tmp_path / "run")
        )


def test_references_are_found_by_other_ranks(tmp_path: Path, ranks: Pools) -> None:
    (reference, wanted), _ = ranks(2).run(by_reference, tmp_path / "run", None)
    for world in (1, 2, 1, 3, 3):
        for _, weights in ranks(world).run(by_reference, tmp_path / "run", reference):
            assert weights == wanted


def test_what_a_crash_left_goes_with_the_next_resume(tmp_path: Path, ranks: Pools) -> None:
    run = tmp_path / "run"
    ranks(1).run(go_on, run, 2, None, {})
    ranks(2).run(fail_in_commit, run, 1)
    ranks(1).run(go_on, run, 0, None, {})
    assert stores(run) == ["run"]


def test_several_drives(tmp_path: Path, ranks: Pools) -> None:
    drives = [tmp_path / "one", tmp_path / "other"]
    given = {"dir": drives}
    last = None
    for world in (2, 1, 3):
        found = ranks(world).run(go_on, tmp_path, 1, None, given)
        assert last is None or found[0][1] == last
        last = found[0][2]
        files = sorted(path.parent.name for path in (tmp_path / "other").rglob("states-*.bin"))
        assert files == (
            ["other"] if world == 1 else [f"rank-{r}-of-{world}" for r in range(world)]
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_leaves_the_old_stores(tmp_path: Path, ranks: Pools, rank: int) -> None:
    ((_, _, wanted),) = ranks(1).run(go_on, tmp_path / "run", 2, None, {})
    said = ranks(2).run(fail_in_commit, tmp_path / "run", rank)
    assert said[rank] == "CommitError: no room"
    assert f"Rank {rank} failed at resume(): CommitError: no room" in said[1 - rank]
    assert stores(tmp_path / "run") == ["rank-0-of-2", "rank-1-of-2", "run"]
    for world in (2, 1):  # what one of two ranks had committed is no commit
        found = ranks(world).run(go_on, tmp_path / "run", 0, None, {})
        assert [(start, before) for start, before, _ in found] == [(2, wanted)] * world


def test_one_process_goes_on_where_some_of_two_ranks_began(tmp_path: Path, ranks: Pools) -> None:
    ((_, _, wanted),) = ranks(1).run(go_on, tmp_path / "run", 2, None, {})
    ranks(2).run(fail_in_commit, tmp_path / "run", 1)
    ((start, before, _),) = ranks(1).run(go_on, tmp_path / "run", 1, None, {})
    assert (start, before) == (2, wanted)


def test_what_is_missing_or_damaged_is_named(tmp_path: Path, ranks: Pools) -> None:
    run = tmp_path / "run"
    ranks(2).run(go_on, run, 2, None, {})
    (run / "rank-1-of-2").rename(tmp_path / "elsewhere")
    (said,) = ranks(1).run(told, run)
    assert "commit in " in said
    assert re.search(
        r"is of 2 ranks, and ranks 1 have no commits there, on \S+\. Copy or mount", said
    )
    (tmp_path / "elsewhere").rename(run / "rank-1-of-2")
    (said,) = ranks(1).run(told, run, 99)
    assert "Generation 99 was requested, and the newest commit" in said
    assert "Name a snapshot" in said
    with open_contents(run / "rank-1-of-2", "A test") as contents:
        (path,) = (file.path for file in contents.files)
        extent = contents.generations[-1].chunks[0].extent
        shape = chunk_shapes(contents.generations[-1].layout)[0]
    for offset in (extent.offset, extent.offset + shape.weight_offset):
        flip(path, offset)
        (said,) = ranks(1).run(told, run)
        assert said.startswith("DamageError: Chunk 0 was read from ")
        assert "rank-1-of-2/states-0.bin" in said
        flip(path, offset)
    assert ranks(1).run(told, run) == ["nothing was raised"]


def test_another_model_is_refused(tmp_path: Path, ranks: Pools) -> None:
    ranks(1).run(go_on, tmp_path / "run", 2, None, {})
    for said in ranks(2).run(told, tmp_path / "run", None, {"dtype": torch.float32}):
        assert "0.weight (bfloat16 (67, 12)) of the run is float32 (67, 12) here" in said
    assert stores(tmp_path / "run") == ["rank-0-of-2", "rank-1-of-2", "run"]


def test_a_live_run_is_not_taken(tmp_path: Path, ranks: Pools) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = AdamW(model.parameters(), states="disk", dir=tmp_path / "run", module=model)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.commit()
    optimizer.wait()
    with optimizer:
        for said in ranks(2).run(told, tmp_path / "run"):
            assert said.startswith(("LockedError: ", "RankError: "))
            assert "is held by pid" in said
