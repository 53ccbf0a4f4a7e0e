"""Looking at a store from outside: live, at rest, after a kill; nothing is written."""

import shutil
from pathlib import Path

import pytest

from powerloss.contents import SHAPE, make_content, release_all
from tensorstow.base.errors import DirectoryError, StoreFormatError
from tensorstow.io.engine import open_engine
from tensorstow.store.inspect import inspect_store
from tensorstow.store.records import HEADER_BYTES
from tensorstow.store.store import Store


def make_store(*directories: Path) -> Store:
    for directory in directories:
        directory.mkdir(exist_ok=True)
    store = Store.open(directories, open_engine())
    for step in (1, 2):
        content = make_content(store, step)
        store.commit(content)
        release_all(store, content)
        if step == 1:
            store.add_snapshot("first")
    return store


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_size, p.stat().st_mtime_ns) for p in directory.iterdir()}


def test_a_store_at_rest(tmp_path: Path) -> None:
    make_store(tmp_path / "a", tmp_path / "b").close()
    before = contents(tmp_path / "a")
    found = inspect_store(tmp_path / "a")
    assert contents(tmp_path / "a") == before
    assert found.holder is None
    assert found.format == 2
    assert [(s.number, s.step, s.names) for s in found.generations] == [
        (1, 1, ("first",)),
        (2, 2, ()),
    ]
    assert [f.path for f in found.files] == [
        tmp_path / "a" / "states-0.bin",
        tmp_path / "b" / "states-1.bin",
    ]
    for file in found.files:
        assert file.bytes == file.path.stat().st_size
        assert file.free_bytes == file.bytes - HEADER_BYTES - file.used_bytes
    assert sum(f.used_bytes for f in found.files) == 2 * (3 * SHAPE.nbytes + 4096)
    assert found.layout is not None
    assert (found.layout.elements, found.layout.chunks) == (3 * SHAPE.elements, 3)
    assert found.layout.shapes == ("0.125 + 2 + 4 bytes of states, 2 of weight",)


def test_a_live_store(tmp_path: Path) -> None:
    with make_store(tmp_path / "a") as store:
        found = inspect_store(tmp_path / "a")
        assert "this process" in str(found.holder)
        assert len(found.generations) == 2
        store.add_snapshot("second")  # it went on undisturbed
    assert inspect_store(tmp_path / "a").generations[1].names == ("second",)


def test_what_a_killed_run_left(tmp_path: Path) -> None:
    with make_store(tmp_path / "a"):
        shutil.copytree(tmp_path / "a", tmp_path / "killed")
    assert (tmp_path / "killed" / "manifest.sqlite-wal").stat().st_size
    found = inspect_store(tmp_path / "killed")
    assert len(found.generations) == 2
    assert found.files[0].path == tmp_path / "killed" / "states-0.bin"


def test_a_directory_that_was_moved(tmp_path: Path) -> None:
    make_store(tmp_path / "a", tmp_path / "b").close()
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b" / "states-1.bin").unlink()
    first, second = inspect_store(tmp_path / "c").files
    assert first.path.parent == tmp_path / "c"
    assert (second.bytes, second.free_bytes) == (None, None)


def test_a_store_without_commits(tmp_path: Path) -> None:
    Store.open([tmp_path], open_engine()).close()
    found = inspect_store(tmp_path)
    assert found.generations == ()
    assert found.layout is None


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreFormatError, match=r"there is no manifest\.sqlite"):
        inspect_store(tmp_path)
    with pytest.raises(DirectoryError, match="does not exist"):
        inspect_store(tmp_path / "absent")
    (tmp_path / "manifest.sqlite").touch()
    with pytest.raises(StoreFormatError, match="never finished"):
        inspect_store(tmp_path)
    (tmp_path / "manifest.sqlite").write_bytes(b"something else" * 1000)
    with pytest.raises(StoreFormatError, match="not a database"):
        inspect_store(tmp_path)
    assert contents(tmp_path).keys() == {"manifest.sqlite"}
