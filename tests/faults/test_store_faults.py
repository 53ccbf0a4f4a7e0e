"""After any failure or kill the last commit is whole, and the error says what to do."""

import errno as codes
import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import torch

import children
from powerloss.contents import damages_in, make_content, release_all
from tensorstow import _native
from tensorstow.base.errors import (
    CommitError,
    DamageError,
    DirectoryError,
    LockedError,
    OptionError,
    SyncError,
    TransferError,
)
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File
from tensorstow.store.durability import SystemDisk
from tensorstow.store.records import Content
from tensorstow.store.store import Store

MIB = 1 << 20


class FailingDisk(SystemDisk):
    """Fails when it is told to, and counts what it was asked."""

    def __init__(self) -> None:
        self.sync_error: OSError | None = None
        self.commit_error: BaseException | None = None
        self.syncs = 0

    def sync_file(self, file: File) -> None:
        self.syncs += 1
        if self.sync_error is not None:
            error, self.sync_error = self.sync_error, None  # the kernel says it once
            raise error
        super().sync_file(file)

    def end_transaction(self, connection: sqlite3.Connection) -> None:
        if self.commit_error is not None:
            raise self.commit_error
        super().end_transaction(connection)


@pytest.fixture
def disk() -> FailingDisk:
    return FailingDisk()


@pytest.fixture
def store(tmp_path: Path, disk: FailingDisk) -> Iterator[Store]:
    with Store.open([tmp_path], open_engine(), disk=disk) as opened:
        content = make_content(opened, 1)
        opened.commit(content)
        release_all(opened, content)
        yield opened


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    return error


def steps(store: Store) -> list[int]:
    return [summary.step for summary in store.generations()]


def is_whole(directory: Path) -> list[int]:
    """Open what is there, read all of it back; return the steps."""
    with Store.open([directory], open_engine()) as again:
        assert damages_in(again) == []
        return steps(again)


def test_a_failed_sync_poisons_the_store_and_is_not_tried_again(
    store: Store, disk: FailingDisk, tmp_path: Path
) -> None:
    content = make_content(store, 2)
    disk.sync_error = OSError(codes.EIO, "I/O error")
    with pytest.raises(SyncError, match=r"states-0\.bin failed .*last commit is whole.*dmesg"):
        store.commit(content)
    asked = disk.syncs
    for act in (
        lambda: store.commit(content),
        lambda: store.add_snapshot("a"),
        lambda: store.allocate(1),
        store.drop_older,
    ):
        with pytest.raises(SyncError, match="cannot go on"):
            act()
    assert disk.syncs == asked
    release_all(store, content)  # tidying up goes on
    assert steps(store) == [1]
    store.close()
    assert is_whole(tmp_path) == [1]


def test_an_io_error_of_the_manifest_poisons_the_store(
    store: Store, disk: FailingDisk, tmp_path: Path
) -> None:
    disk.commit_error = sqlite_error(sqlite3.SQLITE_IOERR_FSYNC)
    with pytest.raises(SyncError, match="Whether the last transaction is durable is not known"):
        store.commit(make_content(store, 2))
    disk.commit_error = None
    with pytest.raises(SyncError, match="cannot go on"):
        store.commit(Content(2, {"chunks": []}, None, None, []))
    store.close()
    assert is_whole(tmp_path) == [1]


def test_a_full_disk_changes_nothing_and_may_be_tried_again(
    store: Store, disk: FailingDisk, tmp_path: Path
) -> None:
    content = make_content(store, 2)
    disk.commit_error = sqlite_error(sqlite3.SQLITE_FULL)
    with pytest.raises(CommitError, match=r"committed before is whole\. Free some space"):
        store.commit(content)
    assert steps(store) == [1]
    disk.commit_error = None
    store.commit(content)
    store.close()
    assert is_whole(tmp_path) == [2]


def test_a_manifest_that_cannot_grow(store: Store, tmp_path: Path) -> None:
    content = make_content(store, 2, chunks=200)
    connection = store._manifest._database.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(CommitError, match="SQLITE_FULL"):
        store.commit(content)
    connection.execute("PRAGMA max_page_count = 100000")
    assert steps(store) == [1]
    store.commit(content)
    store.close()
    assert is_whole(tmp_path) == [2]


def test_an_interrupted_commit_leaves_the_last_one(
    store: Store, disk: FailingDisk, tmp_path: Path
) -> None:
    disk.commit_error = KeyboardInterrupt()
    content = make_content(store, 2)
    with pytest.raises(KeyboardInterrupt):
        store.commit(content)
    disk.commit_error = None
    with pytest.raises(SyncError, match=r"KeyboardInterrupt.* Open the store again"):
        store.commit(content)
    store.close()
    assert is_whole(tmp_path) == [1]


def test_no_room_for_an_extent(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DirectoryError, match=r"no data file can grow") as caught:
        store.allocate(1 << 60)
    assert "1024.0 PiB" in str(caught.value)
    assert "free)" in str(caught.value)
    # The room for growth ahead is not there, that for the request is.
    real = _native.fallocate
    size = store._space.extents.sizes[0]

    def tight(fd: int, length: int) -> int:
        return codes.ENOSPC if length > size + 2 * MIB else real(fd, length)

    monkeypatch.setattr(_native, "fallocate", tight)
    taken = [store.allocate(MIB) for _ in range(size // MIB + 1)]
    assert max(e.end for e in taken) > size
    with pytest.raises(DirectoryError, match="No space left"):
        store.allocate(4 * MIB)
    store.commit(make_content(store, 2))


def test_another_file_grows_where_one_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    with Store.open(directories, open_engine()) as store:
        real, full = _native.fallocate, store.files[0].fd
        monkeypatch.setattr(
            _native, "fallocate", lambda fd, n: codes.ENOSPC if fd == full else real(fd, n)
        )
        assert {store.allocate(MIB).file for _ in range(6)} == {1}


def test_a_failed_write_of_a_tensor_gives_its_extent_back(store: Store) -> None:
    free = store._space.extents.free[0].nbytes
    store.files[0].engine.inject_fault("write", error=codes.EIO)
    with pytest.raises(TransferError):
        store.write_tensor("extra", "x", torch.zeros(1000))
    store.files[0].engine.clear_faults()
    assert store._space.extents.free[0].nbytes == free


def test_a_damaged_tensor_is_told(store: Store) -> None:
    generation = store.generation()
    assert generation is not None
    (record,) = generation.tensors
    with store.files[0].path.open("r+b") as file:
        file.seek(record.extent.offset + 3)
        file.write(b"\xff")
    with pytest.raises(DamageError, match=rf"offset {record.extent.offset}: they are not"):
        store.read_tensor(record)


def started(script: str) -> tuple[children.Child, TextIO]:
    """Start a program; return it, and the lines that it writes."""
    reader, writer = os.pipe()
    child = children.start("-c", script, stdout=writer)
    os.close(writer)
    return child, os.fdopen(reader)


def test_a_killed_run_has_its_last_commit(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
import children
from powerloss.contents import damages_in, make_content, release_all
from tensorstow.io.engine import open_engine
from tensorstow.store.store import Store
store = Store.open([Path({str(tmp_path)!r})], open_engine())
last = store.generation()
step = last.step if last else 0
held = None
while True:
    step += 1
    content = make_content(store, step)
    store.commit(content)
    print(step, flush=True)
    if held:
        release_all(store, held)
    held = content
    if step % 4 == 0:
        store.add_snapshot(f"step-{{step}}")
        if step > 4:
            store.drop_snapshot(f"step-{{step - 4}}")
"""
    dice = random.Random(0)  # noqa: S311
    told = 0
    for killed in range(4):
        run, lines = started(script)
        with lines:
            told = int(lines.readline())
            time.sleep(dice.uniform(0.0, 0.4))
            run.kill()
            told = int([str(told), *lines.read().splitlines()][-1])
        run.wait()
        found = is_whole(tmp_path)
        assert found[-1] in {told, told + 1}
        # A run killed between a snapshot and the drop of the one before leaves it for good.
        assert len(found) <= 3 + killed


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_outlives_its_killed_parent_holds_nothing(tmp_path: Path) -> None:
    script = f"""
import os, time
from pathlib import Path
from tensorstow.io.engine import open_engine
from tensorstow.store.store import Store
store = Store.open([Path({str(tmp_path)!r})], open_engine())
child = os.fork()
if child == 0:
    os.write(1, b"ready\\n")  # at once: two processes share the pipe
    time.sleep(60)
    os._exit(0)
os.write(1, b"%d\\n" % child)
time.sleep(60)
"""
    run, lines = started(script)
    said = {lines.readline().strip() for _ in range(2)}
    (child,) = (int(word) for word in said - {"ready"})
    try:
        with pytest.raises(LockedError, match=f"held by pid {run.pid} "):
            Store.open([tmp_path], open_engine())
        run.kill()
        run.wait()
        os.kill(child, 0)  # it lives
        Store.open([tmp_path], open_engine()).close()
    finally:
        os.kill(child, signal.SIGKILL)
        lines.close()


def test_what_is_wrong_with_a_request_is_no_poison(store: Store) -> None:
    with pytest.raises(OptionError):
        store.add_snapshot("")
    store.commit(make_content(store, 2))
    assert steps(store) == [2]
