"""Where ranks have their stores, and which run is in a directory."""

from pathlib import Path

import pytest

from powerloss.contents import make_content
from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.io.engine import open_engine
from tensorstow.store.rank_dirs import (
    rank_directory,
    refuse_other_worlds,
    stores_in,
    worlds_in,
)
from tensorstow.store.store import Store


def make(base: Path, rank: int, world: int, *, commits: bool = False) -> Path:
    directory = rank_directory(base, rank, world)
    directory.mkdir(exist_ok=True)
    with Store.open([directory], open_engine()) as store:
        if commits:
            store.commit(make_content(store, 1))
    return directory


def test_a_process_alone_has_the_directory_itself(tmp_path: Path) -> None:
    assert rank_directory(tmp_path, 0, 1) == tmp_path
    assert rank_directory(tmp_path, 3, 16) == tmp_path / "rank-3-of-16"


def test_stores_come_by_rank(tmp_path: Path) -> None:
    assert stores_in(tmp_path) == [tmp_path]
    (tmp_path / "rank-1-of-12").mkdir()  # without a store
    (tmp_path / "rank-x-of-12").mkdir()
    made = [make(tmp_path, rank, 12) for rank in (2, 11, 9)]
    assert stores_in(tmp_path) == [made[0], made[2], made[1]]
    make(tmp_path, 0, 1)
    assert stores_in(tmp_path) == [tmp_path, made[0], made[2], made[1]]
    assert worlds_in(tmp_path) == {
        1: {0: tmp_path},
        12: {2: made[0], 9: made[2], 11: made[1]},
    }


def test_a_link_leads_to_no_other_run(tmp_path: Path) -> None:
    own, given = make(tmp_path, 0, 1), tmp_path / "given"
    given.mkdir()
    (given / "rank-0-of-2").symlink_to(own)
    with pytest.raises(DirectoryError, match="rank-0-of-2 in it is a symbolic link"):
        stores_in(given)
    with pytest.raises(DirectoryError, match="rank-0-of-2 in it is a symbolic link"):
        refuse_other_worlds(given, 2)


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (4, 2)])
def test_another_number_of_ranks_is_refused(tmp_path: Path, before: int, now: int) -> None:
    refuse_other_worlds(tmp_path / "new", now)
    refuse_other_worlds(tmp_path, now)
    make(tmp_path, 0, before)
    refuse_other_worlds(tmp_path, now)  # which has committed nothing
    make(tmp_path, 0, before, commits=True)
    refuse_other_worlds(tmp_path, before)
    told = (
        rf"run of {now} rank.* holds one of {before} rank.*Call resume\(\) to go on with that run"
    )
    with pytest.raises(OptionError, match=told):
        refuse_other_worlds(tmp_path, now)
