"""Which generations are meant, and which may go: not what another process reads."""

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from powerloss.contents import make_content
from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.store.inspect import open_pinned
from tensorstow.store.records import Summary
from tensorstow.store.retention import check_name, droppable, dropping, find, pin
from tensorstow.store.scrub import scrub
from tensorstow.store.store import Store

KEPT = [
    Summary(number, number, 0.0, names, 0, 0)
    for number, names in ((2, ("a",)), (3, ()), (5, ("b", "c")), (6, ()), (7, ()))
]


@pytest.mark.parametrize(("keep", "gone"), [(None, [3, 6, 7]), (3, [6, 7]), (5, [3, 6, 7])])
def test_what_a_commit_replaces(keep: int | None, gone: list[int]) -> None:
    assert droppable(KEPT, keep) == gone


def test_by_number_or_name() -> None:
    assert find(KEPT, 6).number == 6
    assert find(KEPT, "c").number == 5
    with pytest.raises(OptionError, match=r"snapshot 'd' .* There are: 2 \(a\), 3, 5 \(b, c\), 6"):
        find(KEPT, "d")
    with pytest.raises(OptionError, match=r"generation 1 .* none at all"):
        find([], 1)


def test_what_may_be_named() -> None:
    assert check_name(KEPT, "new", None).number == 7
    assert check_name(KEPT, "new", 2).number == 2
    for kept, name, told in ((KEPT, "a", "has that name"), (KEPT, "7", "letter"), ([], "x", "yet")):
        with pytest.raises(OptionError, match=told):
            check_name(kept, name, None)


@pytest.fixture
def store(store: Store) -> Store:
    """Commit once."""
    store.commit(make_content(store, 1))
    return store


def numbers(store: Store) -> list[int]:
    return [summary.number for summary in store.generations()]


def test_a_commit_keeps_what_is_read(store: Store, tmp_path: Path) -> None:
    with open_pinned(tmp_path, "A test", 1) as pinned:
        assert pinned is not None
        for seed in (2, 3, 4):
            store.commit(make_content(store, seed))
        assert numbers(store) == [1, 4]
        store.drop_older()
        assert numbers(store) == [1, 4]
        files, generation = pinned
        assert not [d for p in scrub(files, [generation]) for d in p.damages]
    store.commit(make_content(store, 5))
    assert numbers(store) == [5]


def test_a_snapshot_that_is_read_loses_its_name_and_stays(store: Store, tmp_path: Path) -> None:
    store.add_snapshot("one")
    store.commit(make_content(store, 2))
    with open_pinned(tmp_path, "A test", 1):
        store.drop_snapshot("one")
        assert numbers(store) == [1, 2]
    store.commit(make_content(store, 3))
    assert numbers(store) == [3]


def test_what_is_gone_is_not_pinned(store: Store, tmp_path: Path) -> None:
    store.commit(make_content(store, 2))
    with open_pinned(tmp_path, "A test", 1) as pinned:
        assert pinned is None


def test_what_is_being_dropped_is_not_pinned(store: Store, tmp_path: Path) -> None:
    with dropping(store.files[0], [1, 7]) as free:
        assert free == [1, 7]
        with open_pinned(tmp_path, "A test", 1) as pinned:
            assert pinned is None
    with open_pinned(tmp_path, "A test", 1) as pinned:
        assert pinned is not None


def test_a_reader_that_is_killed_holds_nothing(store: Store, tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from tensorstow.store.inspect import open_pinned
with open_pinned(Path(sys.argv[1]), "A test", 1) as pinned:
    print(pinned is not None, flush=True)
    time.sleep(60)
"""
    reader = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"True\n"
    store.commit(make_content(store, 2))
    assert numbers(store) == [1, 2]
    reader.send_signal(signal.SIGKILL)
    reader.communicate()
    store.commit(make_content(store, 3))
    assert numbers(store) == [3]


def test_a_filesystem_without_locks_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(DirectoryError, match=r"the filesystem gives none .*End the run first"):
        pin(store.files[0], 1)
    store.commit(make_content(store, 2))  # nobody can have pinned the first
    assert numbers(store) == [2]
