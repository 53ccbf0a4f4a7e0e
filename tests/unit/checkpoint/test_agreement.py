"""Which generation the ranks of a run go on from, whatever each of them has."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from powerloss.contents import make_content
from ranks.threads import coordinators, each
from tensorstow.base.errors import CommitError, OptionError, RankError
from tensorstow.checkpoint.agreement import (
    COMMIT,
    FIRST,
    add_snapshot,
    choose,
    drop_snapshot,
    snapshots,
)
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.io.engine import open_engine
from tensorstow.store.store import Store


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[Store]]:
    made = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        made.append(Store.open([tmp_path / str(rank)], open_engine()))
    yield made
    for store in made:
        store.close()


def commit(store: Store, step: int, keep: int | None = None) -> None:
    hyper = {COMMIT: f"id-{step}", FIRST: step == 1}
    store.commit(replace(make_content(store, step), hyper=hyper), keep=keep)


def commit_all(stores: list[Store], step: int) -> None:
    for store in stores:
        commit(store, step)


def chosen(stores: list[Store], which: str | int | None = None) -> list[object]:
    """Return the step that each rank goes on from, or what it raises."""

    def act(store: Store, ranks: Ranks) -> int | None:
        found = choose(store, which, ranks)
        return None if found is None else found.step

    met = [Ranks(coordinator) for coordinator in coordinators(2, seconds=5.0)]
    return each([partial(act, s, r) for s, r in zip(stores, met, strict=True)])


def steps(store: Store) -> list[int]:
    return [summary.step for summary in store.generations()]


def test_the_newest_that_all_have(stores: list[Store], caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(stores) == [None, None]
    commit_all(stores, 1)
    assert chosen(stores) == [1, 1]
    assert caplog.text == ""
    commit(stores[1], 2, keep=1)
    assert chosen(stores) == [1, 1]
    assert "going on from step 1, the newest commit that all ranks have" in caplog.text
    assert "(rank 1: 2)" in caplog.text
    commit(stores[0], 2)  # rank 0 has dropped step 1, rank 1 not yet
    assert chosen(stores) == [2, 2]


def test_what_was_abandoned_goes_and_what_all_have_stays(stores: list[Store]) -> None:
    commit_all(stores, 1)
    commit(stores[0], 2, keep=1)
    assert chosen(stores) == [1, 1]
    commit(stores[0], 3, keep=1)  # and the other one is killed before it has it
    assert steps(stores[0]) == [1, 3]
    assert chosen(stores) == [1, 1]


def test_numbers_may_differ(stores: list[Store]) -> None:
    commit_all(stores, 1)
    commit(stores[0], 2, keep=1)
    commit(stores[0], 3)
    commit(stores[1], 3)
    assert [s.number for s in stores[0].generations()] == [3]
    assert [s.number for s in stores[1].generations()] == [2]
    assert chosen(stores) == [3, 3]
    assert chosen(stores, 3) == [3, 3]  # as rank 0 numbers it
    for error in chosen(stores, 2):
        assert "rank 0's generation 2 was requested" in str(error)


def test_a_first_commit_of_some_goes_with_the_next_one_of_all(
    stores: list[Store], caplog: pytest.LogCaptureFixture
) -> None:
    """Not before: the other ranks' directories may be missing for now."""
    caplog.set_level(logging.WARNING)
    commit(stores[1], 1)
    for _ in range(2):
        assert chosen(stores) == [None, None]
        assert steps(stores[1]) == [1]
    assert "was not made by all ranks" in caplog.text
    hyper = {COMMIT: "id-anew", FIRST: True}
    stores[1].commit(replace(make_content(stores[1], 4), hyper=hyper), keep=1)
    assert chosen(stores) == [None, None]  # the other rank was killed before it had this one
    assert steps(stores[1]) == [1, 4]
    stores[0].commit(replace(make_content(stores[0], 4), hyper=hyper))
    assert chosen(stores) == [4, 4]
    stores[1].drop_older()
    assert steps(stores[1]) == [4]


@pytest.mark.parametrize("here", [0, 1])
def test_a_lost_store_is_not_a_new_run(stores: list[Store], here: int) -> None:
    commit(stores[here], 1)
    commit(stores[here], 2)
    for error in chosen(stores):
        assert isinstance(error, RankError)
        assert f"rank {here}: 2" in str(error)
        assert f"rank {1 - here}: nothing" in str(error)
    assert steps(stores[here]) == [2]


def test_a_first_commit_with_a_name_is_not_forgotten(stores: list[Store]) -> None:
    commit(stores[0], 1)
    stores[0].add_snapshot("kept")
    assert all(isinstance(error, RankError) for error in chosen(stores))
    assert steps(stores[0]) == [1]


def test_generations_of_other_runs_are_not_common(stores: list[Store]) -> None:
    """They have no id: a process alone made them."""
    for store in stores:
        store.commit(replace(make_content(store, 4), hyper={COMMIT: None, FIRST: False}))
    assert all(isinstance(error, RankError) for error in chosen(stores))


def named(stores: list[Store], act: object, name: str) -> list[object]:
    met = [Ranks(coordinator) for coordinator in coordinators(2, seconds=5.0)]
    extra = [None] if act is add_snapshot else []
    pairs = zip(stores, met, strict=True)
    return each([partial(act, s, name, *extra, r) for s, r in pairs])  # type: ignore[call-overload]


def test_a_snapshot_is_of_all_ranks(stores: list[Store]) -> None:
    commit_all(stores, 1)
    assert named(stores, add_snapshot, "a") == [None, None]
    commit_all(stores, 2)
    assert chosen(stores, "a") == [1, 1]
    assert all("has that name" in str(error) for error in named(stores, add_snapshot, "a"))
    stores[1].drop_snapshot("a")
    for error in chosen(stores, "a"):
        assert isinstance(error, OptionError)
        assert "snapshot 'a' was requested" in str(error)
        assert "ranks 1 do not have it" in str(error)
        assert "none at all" in str(error)


def test_a_snapshot_of_some_is_not_shown(stores: list[Store]) -> None:
    for store in stores:
        commit(store, 1)
        store.add_snapshot("a")
        commit(store, 2)
    stores[0].add_snapshot("b", 1)
    stores[1].add_snapshot("c")
    met = [Ranks(coordinator) for coordinator in coordinators(2, seconds=5.0)]
    for found in each([partial(snapshots, s, r) for s, r in zip(stores, met, strict=True)]):
        assert [(summary.step, summary.names) for summary in found] == [(1, ("a",))]


def test_a_snapshot_of_some_is_dropped_or_taken_anew(stores: list[Store]) -> None:
    for store in stores:
        commit(store, 1)
        commit(store, 2)
    stores[0].add_snapshot("a")
    assert named(stores, drop_snapshot, "a") == [None, None]
    assert not any(s.names for s in stores[0].generations())
    stores[1].add_snapshot("a")
    commit_all(stores, 3)
    assert named(stores, add_snapshot, "a") == [None, None]
    assert chosen(stores, "a") == [3, 3]
    assert all("not there" in str(error) for error in named(stores, drop_snapshot, "b"))


def test_a_rank_that_cannot_pin_is_named(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_all(stores, 1)

    def full(*_: object) -> None:
        message = "database or disk is full"
        raise CommitError(message)

    monkeypatch.setattr(stores[1], "add_snapshot", full)
    found = named(stores, add_snapshot, "a")
    assert isinstance(found[1], CommitError)
    assert "Rank 1 failed at snapshot('a'): CommitError: database or disk is full" in str(found[0])
    monkeypatch.undo()
    assert named(stores, add_snapshot, "a") == [None, None]
