"""The manifest's second copy: equal after each transaction, and in its place if it is damaged."""

import errno as codes
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from powerloss.contents import commit, make_content, release_all
from tensorstow.base.errors import DamageError, StoreFormatError, SyncError
from tensorstow.io.engine import open_engine
from tensorstow.store import manifest, manifest_copy, verify
from tensorstow.store.durability import SystemDisk
from tensorstow.store.manifest_copy import COPY_NAME, DAMAGED_NAME, ManifestCopy
from tensorstow.store.schema import MANIFEST_NAME
from tensorstow.store.store import Store

TABLES = ("meta", "files", "layouts", "generations", "chunks", "tensors", "snapshots")


def contents(path: Path) -> list[list[tuple[object, ...]]]:
    """Return all rows of a manifest."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        names = (*TABLES, "sqlite_sequence")
        return [sorted(connection.execute(f"SELECT * FROM {n}"), key=repr) for n in names]  # noqa: S608


def is_copied(directory: Path) -> bool:
    return contents(directory / MANIFEST_NAME) == contents(directory / COPY_NAME)


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(40)
        file.write(b"\xff" * 60)


class Disk(SystemDisk):
    """Fails in the copy when it is told to."""

    def __init__(self) -> None:
        self.error: sqlite3.Error | None = None
        self.read_error: OSError | None = None

    def end_transaction(self, connection: sqlite3.Connection) -> None:
        (_, _, path), *_ = connection.execute("PRAGMA database_list")
        if self.error is not None and path.endswith(COPY_NAME):
            raise self.error
        super().end_transaction(connection)

    def read_back(self, path: Path, start: int) -> None:
        if self.read_error is not None:
            raise self.read_error
        super().read_back(path, start)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def store(tmp_path: Path, disk: Disk) -> Iterator[Store]:
    with Store.open([tmp_path], open_engine("threads"), disk=disk) as opened:
        commit(opened, 1)
        yield opened


def test_it_is_equal_after_each_transaction(store: Store, tmp_path: Path) -> None:
    acts: list[Callable[[], object]] = [
        lambda: None,
        lambda: store.add_snapshot("one"),
        lambda: commit(store, 2),
        lambda: store.commit(make_content(store, 3, chunks=5), keep=2),
        lambda: store.add_snapshot("three"),
        store.drop_older,
        lambda: store.drop_snapshot("one"),
        lambda: commit(store, 4),
    ]
    for act in acts:
        act()
        assert is_copied(tmp_path)
    store.close()
    assert is_copied(tmp_path)
    assert (tmp_path / COPY_NAME).stat().st_mode & 0o777 == 0o600


def test_long_logs_are_written_back(store: Store, tmp_path: Path) -> None:
    for step in range(2, 40):
        content = make_content(store, step, extra="x" * 300_000, chunks=1)
        store.commit(content)
        release_all(store, content)
    for name in (MANIFEST_NAME, COPY_NAME):
        assert (tmp_path / f"{name}-wal").stat().st_size < 8 << 20
    assert is_copied(tmp_path)


@pytest.mark.parametrize("act", [damage, Path.unlink, lambda path: path.write_bytes(b"")])
def test_it_takes_the_place_of_a_damaged_manifest(
    act: Callable[[Path], object],
    store: Store,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.add_snapshot("one")
    commit(store, 2)
    wanted = contents(tmp_path / MANIFEST_NAME)
    store.close()
    act(tmp_path / MANIFEST_NAME)
    with Store.open([tmp_path], open_engine("threads")) as again:
        assert contents(tmp_path / MANIFEST_NAME) == wanted
        assert is_copied(tmp_path)
        commit(again, 3)
    assert "which has all that was reported, is in its place" in caplog.text
    assert (tmp_path / DAMAGED_NAME).exists() == (act is not Path.unlink)


def test_it_is_made_anew_if_it_is_damaged_or_older(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tmp_path, tmp_path / "older")
    commit(store, 2)
    store.close()
    for act in (damage, Path.unlink, lambda p: shutil.copy(tmp_path / "older" / COPY_NAME, p)):
        act(tmp_path / COPY_NAME)
        with Store.open([tmp_path], open_engine("threads")):
            assert is_copied(tmp_path)
        assert is_copied(tmp_path)
    assert caplog.text.count("is made anew") == 1  # an older one is what a kill leaves


def test_one_that_has_lost_what_was_reported_is_not_put_there(store: Store, tmp_path: Path) -> None:
    store.close()
    shutil.copytree(tmp_path, tmp_path / "older")
    with Store.open([tmp_path], open_engine("threads")) as again:
        for step in (2, 3):
            commit(again, step)
    damage(tmp_path / MANIFEST_NAME)
    before = (tmp_path / MANIFEST_NAME).read_bytes()
    shutil.copy(tmp_path / "older" / COPY_NAME, tmp_path)
    with pytest.raises(DamageError):
        Store.open([tmp_path], open_engine("threads"))
    assert (tmp_path / MANIFEST_NAME).read_bytes() == before


def test_a_kill_between_the_two_loses_nothing(
    store: Store, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: ManifestCopy) -> None:
        shutil.copytree(tmp_path, tmp_path / "after", ignore=shutil.ignore_patterns("after"))
        raise KeyboardInterrupt

    monkeypatch.setattr(ManifestCopy, "update", killed)
    with pytest.raises(KeyboardInterrupt):
        store.commit(make_content(store, 2))
    monkeypatch.undo()
    with pytest.raises(SyncError, match="Open the store again"):
        store.add_snapshot("x")
    with Store.open([tmp_path / "after"], open_engine("threads"), disk=disk) as again:
        assert [s.step for s in again.generations()] == [2]
        assert is_copied(tmp_path / "after")


def test_a_full_disk_is_logged_and_made_up_for(
    store: Store, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk.error = sqlite3.OperationalError("full")
    disk.error.sqlite_errorcode = sqlite3.SQLITE_FULL
    for step in (2, 3):
        commit(store, step)
        assert not is_copied(tmp_path)
    assert caplog.text.count("has no second copy of its last transaction") == 2
    disk.error = None
    commit(store, 4)
    assert is_copied(tmp_path)


def test_a_drive_that_fails_ends_the_store(store: Store, disk: Disk, tmp_path: Path) -> None:
    disk.error = sqlite3.OperationalError("I/O")
    disk.error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    with pytest.raises(SyncError, match=COPY_NAME):
        store.commit(make_content(store, 2))
    with pytest.raises(SyncError, match="cannot go on"):
        store.add_snapshot("x")
    disk.error = None
    store.close()
    with Store.open([tmp_path], open_engine("threads"), disk=disk) as again:
        assert [s.step for s in again.generations()] == [2]
        again.add_snapshot("kept")
        disk.read_error = OSError(codes.EIO, "other bytes at offset 0")
        with pytest.raises(SyncError, match="did not come back from the drive as it was"):
            again.commit(make_content(again, 3))


def test_what_the_drive_lost_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_bytes(bytes(300_000))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    disk = SystemDisk()
    for start in (0, 5000, 299_999):
        disk.read_back(path, start)
    real = os.preadv

    def other(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        if offset <= 200_000 < offset + count:
            buffers[0][200_000 - offset : 200_001 - offset] = b"?"
        return count

    monkeypatch.setattr(os, "preadv", other)
    disk.read_back(path, 290_000)
    with pytest.raises(OSError, match="other bytes in the block at offset 131072"):
        disk.read_back(path, 0)


def test_only_what_is_new_is_read_back(
    store: Store, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, 2)
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        disk, "read_back", lambda path, start: seen.append((path.name, start, path.stat().st_size))
    )
    commit(store, 3)
    assert [name for name, _, _ in seen] == [f"{MANIFEST_NAME}-wal", f"{COPY_NAME}-wal"]
    assert all(0 < start < size for _, start, size in seen)


def test_a_file_of_that_name_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / COPY_NAME).write_text("mine")
    with pytest.raises(StoreFormatError, match=COPY_NAME):
        Store.open([tmp_path], open_engine("threads"))
    assert (tmp_path / COPY_NAME).read_text() == "mine"
    assert not (tmp_path / "states-0.bin").exists()


def test_it_is_written_where_no_thread_can_be_started(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        message = "can't start new thread at interpreter shutdown"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    commit(store, 2)
    monkeypatch.undo()
    assert is_copied(tmp_path)


def test_a_manifest_of_an_older_version_gets_one(store: Store, tmp_path: Path) -> None:
    store.close()
    (tmp_path / COPY_NAME).unlink()
    with Store.open([tmp_path], open_engine("threads")):
        assert is_copied(tmp_path)


def test_a_copy_that_takes_the_place_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open([tmp_path], open_engine()) as store:
        commit(store, 1)
        store.add_snapshot("kept")
        commit(store, 2)
    path = tmp_path / MANIFEST_NAME
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE generations SET step = step + 1")
        connection.commit()
    read: list[str] = []
    real = verify.check_all

    def counted(connection: sqlite3.Connection, path: Path) -> int:
        read.append(path.name)
        return real(connection, path)

    monkeypatch.setattr(verify, "check_all", counted)
    monkeypatch.setattr(manifest_copy, "check_all", counted)
    monkeypatch.setattr(manifest, "check_all", counted)
    with Store.open([tmp_path], open_engine()) as store:
        assert [summary.step for summary in store.generations()] == [1, 2]
    # As it was found, its copy before that takes its place, and the copy that stays.
    assert read == [MANIFEST_NAME, COPY_NAME, COPY_NAME]
