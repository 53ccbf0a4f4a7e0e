"""The real disk: files of one owner, names and contents made durable."""

import stat
from pathlib import Path

import pytest

from tensorstow.io.engine import open_engine
from tensorstow.store.durability import SystemDisk


def test_a_file_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    disk, path = SystemDisk(), tmp_path / "file"
    disk.create(path, b"page" * 1024)
    assert path.read_bytes() == b"page" * 1024
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with disk.open(open_engine(), path) as file:
        disk.sync_file(file)
    disk.sync_directory(tmp_path)


def test_what_cannot_be_synced_says_so(tmp_path: Path) -> None:
    disk = SystemDisk()
    with pytest.raises(OSError, match="No such file"):
        disk.sync_directory(tmp_path / "absent")
    disk.create(tmp_path / "file", b"")
    file = disk.open(open_engine(), tmp_path / "file")
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        disk.sync_file(file)


def test_a_link_is_not_followed_to_make_a_file(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        SystemDisk().create(tmp_path / "link", b"page")
    assert (tmp_path / "victim").read_text() == "precious"
