"""One holder; looking does not disturb; another program's file is left alone."""

import errno as codes
import fcntl
import json
import os
import threading
import time
from pathlib import Path

import pytest

from tensorstow.base.errors import DirectoryError, LockedError, StoreFormatError
from tensorstow.base.mounts import Mount
from tensorstow.store import lock as lock_module
from tensorstow.store.lock import DirectoryLock, peek, read_holder


def test_the_holder_is_named_and_the_lock_comes_back(tmp_path: Path) -> None:
    held = DirectoryLock(tmp_path)
    with peek(tmp_path) as holder:
        assert holder is not None
        assert f"pid {os.getpid()} on " in holder
    with pytest.raises(LockedError, match="Wait until that is over"):
        DirectoryLock(tmp_path)
    held.release()
    held.release()
    with peek(tmp_path) as holder:
        assert holder is None
    DirectoryLock(tmp_path).release()


def test_without_a_lock_there_is_no_holder(tmp_path: Path) -> None:
    with peek(tmp_path) as holder:
        assert holder is None
    assert list(tmp_path.iterdir()) == []


def test_one_who_looks_is_waited_for(tmp_path: Path) -> None:
    DirectoryLock(tmp_path).release()
    looking = threading.Event()

    def look() -> None:
        with peek(tmp_path):
            looking.set()
            time.sleep(0.2)

    thread = threading.Thread(target=look)
    thread.start()
    looking.wait()
    DirectoryLock(tmp_path).release()
    thread.join()


def test_a_child_that_is_forked_while_one_looks_keeps_no_lock(tmp_path: Path) -> None:
    DirectoryLock(tmp_path).release()
    ends, goes_on = os.pipe()
    with peek(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(goes_on)
            os.read(ends, 1)
            os._exit(0)
    try:
        DirectoryLock(tmp_path).release()
    finally:
        os.close(ends)
        os.close(goes_on)
        os.waitpid(child, 0)


def test_a_lock_that_was_removed_meanwhile_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, times = fcntl.flock, []

    def slow(fd: int, kind: int) -> None:
        if not times:  # somebody cleans up between our opening and our locking
            (tmp_path / "lock").unlink()
        times.append(fd)
        real(fd, kind)

    monkeypatch.setattr(lock_module.fcntl, "flock", slow)
    held = DirectoryLock(tmp_path)
    assert len(times) == 2
    assert os.path.samestat(os.fstat(held._fd), (tmp_path / "lock").stat())
    held.release()


def test_another_programs_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("door")
    with pytest.raises(StoreFormatError, match="another program's file"):
        DirectoryLock(tmp_path)
    assert (tmp_path / "lock").read_text() == "door"


def test_a_filesystem_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _kind: int) -> None:
        raise OSError(codes.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "flock", refuse)
    with pytest.raises(DirectoryError, match="the filesystem gives none"):
        DirectoryLock(tmp_path)


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="No such file"):
        DirectoryLock(tmp_path / "absent")


def test_a_holder_that_says_nothing(tmp_path: Path) -> None:
    assert read_holder(tmp_path / "absent") == "a process that has not said which"


def test_a_full_disk_can_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _data: bytes, _offset: int) -> int:
        raise OSError(codes.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    held = DirectoryLock(tmp_path)
    with peek(tmp_path) as holder:
        assert holder == "a process that has not said which"
    held.release()


@pytest.mark.parametrize("target", ["nowhere", "another"])
def test_a_link_is_neither_followed_nor_written_to(tmp_path: Path, target: str) -> None:
    (tmp_path / "another").write_text("pid of another program")
    (tmp_path / "lock").symlink_to(tmp_path / target)
    with pytest.raises(DirectoryError, match="it is a symbolic link where"):
        DirectoryLock(tmp_path)
    assert not (tmp_path / "nowhere").exists()
    assert (tmp_path / "another").read_text() == "pid of another program"


@pytest.fixture
def local_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every filesystem count as one whose locks do not reach other machines."""
    monkeypatch.setattr(Mount, "has_local_locks", property(lambda _: True))


@pytest.mark.usefixtures("local_locks")
def test_the_name_of_a_holder_elsewhere_is_believed_where_locks_are_local(tmp_path: Path) -> None:
    DirectoryLock(tmp_path).release()
    assert (tmp_path / "lock").read_text().strip() == ""
    (tmp_path / "lock").write_text("pid 7 on far since then")
    with pytest.raises(LockedError, match=r"held by pid 7 on far since then, or .* was killed"):
        DirectoryLock(tmp_path)
    (tmp_path / "lock").unlink()
    held = DirectoryLock(tmp_path)
    text = (tmp_path / "lock").read_text()
    held.release()
    (tmp_path / "lock").write_text(text)  # this process, by another mount
    with pytest.raises(LockedError, match="locks of this filesystem do not reach"):
        DirectoryLock(tmp_path)
    here = text.replace(str(os.getpid()), "4194305")  # above the largest that there is
    (tmp_path / "lock").write_text(here)
    DirectoryLock(tmp_path).release()


@pytest.mark.usefixtures("local_locks")
@pytest.mark.parametrize("part", [1, 2], ids=["boot", "numbers of processes"])
def test_a_name_of_this_machine_s_is_not_this_machine(tmp_path: Path, part: int) -> None:
    """Machines and containers may have one name; numbers of processes mean nothing elsewhere."""
    held = DirectoryLock(tmp_path)
    words, process, _ = (tmp_path / "lock").read_text().split("\n")
    held.release()
    other = json.loads(process)
    other["machine"][part], other["pid"] = "another", 4194305
    (tmp_path / "lock").write_text(f"{words}\n{json.dumps(other)}\n")
    with pytest.raises(LockedError, match="locks of this filesystem do not reach"):
        DirectoryLock(tmp_path)


@pytest.mark.usefixtures("local_locks")
def test_a_number_that_another_process_got_is_not_the_holder(tmp_path: Path) -> None:
    held = DirectoryLock(tmp_path)
    words, process, _ = (tmp_path / "lock").read_text().split("\n")
    held.release()
    before = {**json.loads(process), "began": "1"}
    (tmp_path / "lock").write_text(f"{words}\n{json.dumps(before)}\n")
    DirectoryLock(tmp_path).release()


def test_the_lock_is_believed_where_it_is_shared(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("pid 7 on far since then")
    DirectoryLock(tmp_path).release()


def test_a_child_does_not_remove_its_parents_name(tmp_path: Path) -> None:
    held = DirectoryLock(tmp_path)
    held.abandon()
    assert (tmp_path / "lock").read_text().startswith(f"pid {os.getpid()} ")
