"""Opening: in an order that can be cut short anywhere, and nothing is held after a failure."""

import errno as codes
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from powerloss.contents import commit, damages_in, make_content, release_all
from powerloss.events import Created, DirectorySynced, FileSynced, ManifestCommitted, Written
from powerloss.recorder import RecordingDisk
from process_counts import open_descriptors
from tensorstow.base.errors import DirectoryError, LockedError, UnlinkedError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File
from tensorstow.store.durability import SystemDisk
from tensorstow.store.opening import Links, open_parts
from tensorstow.store.store import Store


def test_the_manifest_tells_of_files_that_are_durable(tmp_path: Path) -> None:
    disk = RecordingDisk()
    Store.open([tmp_path], open_engine(), disk=disk).close()
    assert [type(event) for event in disk.events] == [
        Created,
        Created,
        FileSynced,
        DirectorySynced,
        ManifestCommitted,
        Written,  # what the data file knows of it
        FileSynced,
        Created,  # the copy
        DirectorySynced,
        ManifestCommitted,
    ]
    again = RecordingDisk()
    Store.open([tmp_path], open_engine(), disk=again).close()
    assert again.events == []


class BrokenDisk(SystemDisk):
    def sync_file(self, file: File) -> None:
        raise OSError(codes.EIO, os.strerror(codes.EIO), str(file.path))


@pytest.mark.usefixtures("garbage_apart")
def test_a_failure_lets_go_of_everything(tmp_path: Path) -> None:
    before = open_descriptors()
    engine = open_engine()
    with pytest.raises(DirectoryError, match=r"states-0\.bin.*dmesg"):
        open_parts([tmp_path], engine, BrokenDisk())
    del engine
    assert open_descriptors() == before
    Store.open([tmp_path], open_engine()).close()


def test_every_directory_is_locked(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    one.mkdir()
    two.mkdir()
    with Store.open([one, two], open_engine()):
        for directory in (one, two):
            with pytest.raises(LockedError, match=str(directory)):
                Store.open([directory], open_engine())


NAMES = ("a/lock", "a/manifest.sqlite", "a/manifest.sqlite-wal", "a/manifest.sqlite-shm")
FILES = [
    *NAMES,
    "a/manifest-copy.sqlite",
    "a/manifest-copy.sqlite-wal",
    "a/states-0.bin",
    "b/lock",
    "b/states-1.bin",
]


def open_store(root: Path) -> Store:
    for name in "ab":
        (root / name).mkdir(exist_ok=True)
    return Store.open([root / "a", root / "b"], open_engine("threads"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        commit(opened, 1)
        yield opened


def replaced(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [Path.unlink, moved, replaced])
def test_every_file_is_looked_for(
    change: Callable[[Path], None], name: str, store: Store, tmp_path: Path
) -> None:
    change(tmp_path / name)
    content = make_content(store, 2)
    for act in (lambda: store.commit(content), lambda: store.add_snapshot("a")):
        with pytest.raises(UnlinkedError, match=r"deleted or moved.*commit_to\(") as caught:
            act()
        assert str(tmp_path / name) in str(caught.value)
        assert caught.value.committed is None


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_directory_that_comes_back(name: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / name).rename(tmp_path / "elsewhere")
    content = make_content(store, 2)
    with pytest.raises(UnlinkedError):
        store.commit(content)
    (tmp_path / name).mkdir()  # an empty one of the same name is not it
    with pytest.raises(UnlinkedError):
        store.commit(content)
    (tmp_path / name).rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / name)
    store.commit(content)
    store.close()
    with open_store(tmp_path) as again:
        assert [s.step for s in again.generations()] == [2]


def test_files_that_go_during_the_transaction(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, add = make_content(store, 2), store._manifest.add

    def add_and_go(*given: object) -> int:
        number = add(*given)  # type: ignore[arg-type]
        (tmp_path / "a").rename(tmp_path / "elsewhere")
        return number

    monkeypatch.setattr(store._manifest, "add", add_and_go)
    with pytest.raises(UnlinkedError) as caught:
        store.commit(content)
    generation = caught.value.committed
    monkeypatch.undo()
    assert generation == store.generation()  # its extents are in use, wherever they are
    (tmp_path / "elsewhere").rename(tmp_path / "a")
    release_all(store, content)
    commit(store, 3)


def test_a_link_to_a_moved_directory_is_the_same_place(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    commit(store, 2)


def test_nothing_is_wanted_of_no_files() -> None:
    Links().check()


def test_a_generation_is_copied_to_another_store(store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    content = make_content(store, 2)
    shutil.rmtree(tmp_path / "a")
    with Store.open([tmp_path / "other"], open_engine("threads")) as other:
        copied = other.copy(store, content)
        generation = other.commit(copied)
        assert damages_in(other) == []
        assert (generation.hyper, len(generation.chunks)) == (content.hyper, len(content.chunks))
        release_all(other, copied)
