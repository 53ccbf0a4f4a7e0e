import errno
import os
import socket
from pathlib import Path

import pytest

from tensorstow.base.errors import DirectoryError
from tensorstow.base.regular_file import (
    check_regular,
    is_there,
    memory_bytes,
    open_regular,
    read_regular,
    regular_stream,
)


def make(path: Path, kind: str) -> None:
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a directory", "a socket"])
@pytest.mark.parametrize("access", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_CREAT])
def test_another_kind_of_file_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, access: int
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    make(Path("file"), kind)
    with pytest.raises(DirectoryError, match=f"File file was requested, and it is {kind} where"):
        open_regular("file", access)
    with pytest.raises(DirectoryError, match=f"it is {kind} where"):
        check_regular("file")


def test_a_link_is_followed_unless_it_must_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    assert read_regular(link, 5) == b"bytes"
    with pytest.raises(DirectoryError, match="it is a symbolic link where"):
        read_regular(link, 5, os.O_NOFOLLOW)
    with pytest.raises(DirectoryError, match="it is a symbolic link where"):
        check_regular(link, follow_links=False)


def test_a_size_that_is_not_plausible_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(DirectoryError, match=r"it has 1\.0 TiB where at most 64\.0 MiB are"):
        read_regular(path, 64 << 20)
    assert check_regular(path).st_size == 1 << 40
    os.truncate(path, 6)
    assert read_regular(path, 6) == bytes(6)


def test_what_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    facts = path.stat()
    path.unlink()
    os.mkfifo(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda *_, **__: facts)  # as it was a moment ago
        with pytest.raises(DirectoryError, match="it is a pipe where"):
            open_regular(path)


def test_a_file_that_grew_while_it_was_read_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(9))
    monkeypatch.setattr(os, "set_blocking", lambda *_: os.truncate(path, 11))
    with pytest.raises(DirectoryError, match="it has 11 B where at most 10 B"):
        read_regular(path, 10)


def test_the_descriptor_is_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        assert os.get_blocking(fd)
        assert not os.get_inheritable(fd)
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.close(fd)
    with pytest.raises(FileNotFoundError), regular_stream(tmp_path / "absent"):
        pass


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(9))
    before = [*Path("/proc/self/fd").iterdir()]
    for _ in range(3):
        with pytest.raises(DirectoryError):
            read_regular(path, 8)
        assert read_regular(path, 9) == bytes(9)
    assert len([*Path("/proc/self/fd").iterdir()]) == len(before)


def test_the_memory_is_that_of_the_machine() -> None:
    total = Path("/proc/meminfo").read_text().split()[1]
    assert memory_bytes() == pytest.approx(int(total) << 10, rel=0.02)


def test_a_name_whose_file_cannot_be_looked_at_is_not_taken_for_a_free_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_there(tmp_path)
    assert not is_there(tmp_path / "none")
    assert not is_there(tmp_path / ("x" * 300))

    def broken(path: Path) -> None:
        raise OSError(errno.EIO, "input/output error", str(path))

    monkeypatch.setattr(Path, "lstat", broken)
    with pytest.raises(DirectoryError, match="nput/output error"):
        is_there(tmp_path)
