"""Removing a dead run: all of its own files, and none of anybody else's."""

import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest

from attacks.rows import redigest
from powerloss.contents import make_content
from tensorstow.base.errors import (
    DamageError,
    LockedError,
    OptionError,
    StoreFormatError,
    StowError,
)
from tensorstow.io.engine import open_engine
from tensorstow.store.remove import hold_dead_run, remove
from tensorstow.store.store import Store


def make_store(*directories: Path) -> Store:
    for directory in directories:
        directory.mkdir(exist_ok=True)
    store = Store.open(directories, open_engine())
    store.commit(make_content(store, 4))
    return store


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def clean(*directories: Path) -> None:
    first, *others = directories
    with hold_dead_run(first, others) as removal:
        remove(removal)


def test_only_its_own_files_go(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    make_store(one, two).close()
    (one / "notes.txt").write_text("mine")
    (two / "states-7.bin").write_bytes(b"who knows")
    with hold_dead_run(one, [two]) as removal:
        assert [s.step for s in removal.generations] == [4]
        assert removal.foreign == (one / "notes.txt", two / "lock", two / "states-7.bin")
        assert removal.nbytes >= sum(f.stat().st_blocks * 512 for f in removal.files) > 0
        assert "notes.txt" in left(one)
        remove(removal)
    assert left(one) == ["notes.txt"]
    assert left(two) == ["lock", "states-7.bin"]


def test_a_directory_can_be_used_again(tmp_path: Path) -> None:
    make_store(tmp_path / "a").close()
    clean(tmp_path / "a")
    assert left(tmp_path / "a") == []
    make_store(tmp_path / "a").close()


def test_a_data_file_of_another_run_stays(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in "abc")
    make_store(one, two).close()
    make_store(three, tmp_path / "d").close()
    (two / "states-1.bin").write_bytes((tmp_path / "d" / "states-1.bin").read_bytes())
    clean(one, two)
    assert left(two) == ["lock", "states-1.bin"]


def test_a_live_run_is_refused(tmp_path: Path) -> None:
    with make_store(tmp_path / "a"):
        before = left(tmp_path / "a")
        with pytest.raises(LockedError, match="End that first"), hold_dead_run(tmp_path / "a"):
            pass
        assert left(tmp_path / "a") == before


def test_a_removal_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    make_store(tmp_path / "a", tmp_path / "b").close()
    (tmp_path / "a" / "states-0.bin").unlink()
    (tmp_path / "b" / "states-1.bin").unlink()
    (tmp_path / "b" / "lock").unlink()
    (tmp_path / "b").rmdir()
    clean(tmp_path / "a")
    assert left(tmp_path / "a") == []


def test_directories_that_are_not_named_stay_as_they_are(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    make_store(one, two).close()
    shutil.copytree(one, tmp_path / "copy")
    (two / "lock").unlink()
    with pytest.raises(OptionError, match=f"tensorstow run clean {one} {two}"):
        clean(one)
    clean(tmp_path / "copy")  # the files in the other directory are the original's
    assert left(tmp_path / "copy") == []
    assert left(two) == ["states-1.bin"]
    clean(one, tmp_path)  # in one that is named
    assert left(two) == []


def test_a_manifest_that_names_a_directory_of_others_changes_nothing_there(
    tmp_path: Path,
) -> None:
    one, others = tmp_path / "a", tmp_path / "others"
    make_store(one).close()
    others.mkdir()
    (others / "states-1.bin").write_bytes((one / "states-0.bin").read_bytes())
    connection = sqlite3.connect(one / "manifest.sqlite", isolation_level=None)
    connection.execute("INSERT INTO files VALUES (1, ?)", (str(others),))
    redigest(connection)
    connection.close()
    clean(one)
    assert left(others) == ["states-1.bin"]


@pytest.mark.parametrize("row", ["named/../victim", "named/link", "named/plain"])
def test_nothing_leads_out_of_a_directory_that_is_named(tmp_path: Path, row: str) -> None:
    """The lock of another run there stays, too."""
    one, named, victim = (tmp_path / name for name in ("run", "named", "victim"))
    make_store(one).close()
    for directory in (named, victim, named / "plain"):
        directory.mkdir()
        shutil.copy(one / "lock", directory)
    (named / "link").symlink_to(victim)
    connection = sqlite3.connect(one / "manifest.sqlite", isolation_level=None)
    connection.execute("INSERT INTO files VALUES (1, ?)", (str(tmp_path / row),))
    redigest(connection)
    connection.close()
    told = "cannot be the directory of data file 1"
    with pytest.raises(DamageError, match=told) if ".." in row else suppress(StowError):
        clean(one, named)
    for directory in (named, victim, named / "plain"):
        assert (directory / "lock").exists()


def test_a_link_in_a_directory_that_is_named_leads_to_no_file_of_the_run(tmp_path: Path) -> None:
    one, two, named = (tmp_path / name for name in ("run", "two", "named"))
    make_store(one, two).close()
    named.mkdir()
    (named / "link").symlink_to(two)
    connection = sqlite3.connect(one / "manifest.sqlite", isolation_level=None)
    connection.execute("UPDATE files SET directory = ? WHERE file = 1", (str(named / "link"),))
    redigest(connection)
    connection.close()
    with pytest.raises(OptionError, match="which was not named"):
        clean(one, named)
    assert left(two) == ["lock", "states-1.bin"]


def test_a_folder_that_is_no_store_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "states-0.bin").write_text("not ours")
    with pytest.raises(StoreFormatError), hold_dead_run(tmp_path):
        pass
    assert left(tmp_path) == ["states-0.bin"]
