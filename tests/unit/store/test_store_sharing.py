"""Whose store it is: other processes, other runs, other places, children."""

import os
from pathlib import Path

import pytest

import children
from powerloss.contents import commit
from tensorstow.base.errors import (
    DirectoryError,
    ForkError,
    LockedError,
    OptionError,
    StoreFormatError,
)
from tensorstow.io.engine import open_engine
from tensorstow.store.records import Content
from tensorstow.store.store import Store


@pytest.mark.usefixtures("store")
def test_a_second_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LockedError, match=rf"this process itself \(pid {os.getpid()} "):
        Store.open([tmp_path], open_engine())
    script = f"""
from pathlib import Path
from tensorstow.io.engine import open_engine
from tensorstow.store.store import Store
try:
    Store.open([Path({str(tmp_path)!r})], open_engine())
except OSError as error:
    print(error)
"""
    assert f"held by pid {os.getpid()} on " in children.run("-c", script).stdout


def test_directories_of_two_runs_are_told_apart(tmp_path: Path) -> None:
    one, two, three, four = (tmp_path / name for name in "abcd")
    for directory in (one, two, three, four):
        directory.mkdir()
    for pair in ([one, two], [three, four]):
        with Store.open(pair, open_engine()) as store:
            commit(store, 1)
    for wrong, told in (
        ([one, four], "run .* it is file 1 of 2 of run "),
        ([one], "as file 0 of 1 of run .* it is file 0 of 2"),
        ([one, three], "there is no such file"),
        ([two, one], "/b, has no manifest; but there is .*/b/states-1.bin: it is file 1 of 2"),
        ([one, tmp_path], "there is no such file"),
    ):
        with pytest.raises(StoreFormatError, match=told):
            Store.open(wrong, open_engine())
    with pytest.raises(OptionError, match="once"):
        Store.open([one, one], open_engine())
    with pytest.raises(OptionError, match="once"):
        Store.open([], open_engine())
    Store.open([one, two], open_engine()).close()


def test_directories_may_be_moved(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with Store.open([tmp_path / "old"], open_engine()) as store:
        commit(store, 3)
    (tmp_path / "old").rename(tmp_path / "new")
    with Store.open([tmp_path / "new"], open_engine()) as store:
        found = store.generation()
        assert found is not None
        assert found.step == 3


def test_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="stays in RAM"):
        Store.open([Path("/dev/shm")], open_engine())
    with pytest.raises(DirectoryError, match="does not exist"):
        Store.open([tmp_path / "absent"], open_engine())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_may_not_use_it(store: Store, tmp_path: Path) -> None:
    commit(store, 1)
    pid = os.fork()
    if pid == 0:
        refused = 0
        for act in (
            store.generations,
            store.generation,
            lambda: store.allocate(1),
            lambda: store.add_snapshot("a"),
            lambda: store.commit(Content(1, {}, 0, 0, [])),
        ):
            try:
                act()
            except ForkError:
                refused += 1
        store.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    commit(store, 2)
    store.close()
    with Store.open([tmp_path], open_engine()) as again:
        assert [s.step for s in again.generations()] == [2]
