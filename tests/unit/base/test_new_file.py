"""New files: nothing under a name until they are complete, and no link is followed."""

import errno as codes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import children
from tensorstow.base.errors import DirectoryError
from tensorstow.base.new_file import NewFile, NewFiles, new_stream, open_new


@pytest.fixture(params=["nameless", "named"])
def _filesystem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a filesystem that has nameless files, or one that has not."""
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(codes.EOPNOTSUPP, "no O_TMPFILE")
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            assert flags & os.O_NOFOLLOW
        return real(path, flags, *rest, **more)

    if request.param == "named":
        monkeypatch.setattr(os, "open", refuse)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, text: str) -> None:
    with new_stream(path) as stream:
        stream.write(text.encode())


@pytest.mark.usefixtures("_filesystem")
def test_a_file_replaces_the_older_one_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("first", "second"):
        before = path.read_text() if path.exists() else None
        with new_stream(path) as stream:
            stream.write(text.encode())
            stream.flush()
            assert (path.read_text() if path.exists() else None) == before
        assert path.read_text() == text
    assert names_in(tmp_path) == ["file"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


@pytest.mark.usefixtures("_filesystem")
def test_an_error_leaves_the_older_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "older")
    with pytest.raises(TypeError), new_stream(path) as stream:
        stream.write("newer")
    assert path.read_text() == "older"
    assert names_in(tmp_path) == ["file"]


@pytest.mark.usefixtures("_filesystem")
def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for target in (victim, tmp_path / "nowhere"):
        (tmp_path / "file").unlink(missing_ok=True)
        (tmp_path / "file").symlink_to(target)
        write(tmp_path / "file", "new")
        assert not (tmp_path / "file").is_symlink()
    assert victim.read_text() == "precious"
    assert names_in(tmp_path) == ["file", "victim"]


@pytest.mark.usefixtures("_filesystem")
def test_a_set_is_discarded_whole_until_it_is_kept(tmp_path: Path) -> None:
    with NewFiles() as made:
        for name in ("a", "b"):
            with made.create(tmp_path / name).stream() as stream:
                stream.write(name.encode())
    assert names_in(tmp_path) == []


@pytest.mark.usefixtures("_filesystem")
def test_a_set_that_cannot_be_published_is_still_on_disk(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with NewFiles() as made:
        for name in ("a", "b"):
            with made.create(tmp_path / name).stream() as stream:
                stream.write(name.encode())
        made.keep()
        with pytest.raises(DirectoryError, match=r"b was requested: Is a directory"):
            made.publish()
    assert (tmp_path / "a").read_text() == "a"
    (left,) = tmp_path.glob(".b.*")
    assert left.read_text() == "b"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_large_set_takes_few_descriptors(tmp_path: Path) -> None:
    with NewFiles() as made:
        for number in range(300):
            with made.create(tmp_path / str(number)).stream() as stream:
                stream.write(b"x")
        assert len([file for file in made._files if file.fd >= 0]) < 200
        made.keep()
        made.publish()
    assert names_in(tmp_path) == sorted(map(str, range(300)))


def test_a_name_that_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    names = [f".tensorstow-{'0' * 16}", f".tensorstow-{'1' * 16}", f".file.{'2' * 16}", ".mine"]
    for name in names:
        (tmp_path / name).touch()
        if "1" not in name:
            os.utime(tmp_path / name, (time.time() - 90_000,) * 2)
    fd, made = open_new(tmp_path, nameless=False)
    os.close(fd)
    assert made is not None
    made.unlink()
    assert names_in(tmp_path) == sorted(names[1:])


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_file_that_the_system_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(codes.EIO, "refused")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(DirectoryError, match=r"file was requested: Input/output error"):
        write(tmp_path / "file", "text")
    monkeypatch.undo()
    assert names_in(tmp_path) == []


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"none/file was requested: No such file"):
        NewFile(tmp_path / "none" / "file")


def test_the_contents_are_durable_before_they_have_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    for owner, name in ((os, "fsync"), (os, "link"), (Path, "replace")):
        real: Callable[..., object] = getattr(owner, name)

        def noted(
            *a: object, n: str = name, r: Callable[..., object] = real, **k: object
        ) -> object:
            log.append(n)
            return r(*a, **k)

        monkeypatch.setattr(owner, name, noted)
    write(tmp_path / "file", "first")
    assert log == ["fsync", "link", "fsync"]
    log.clear()
    write(tmp_path / "file", "second")
    assert log == ["fsync", "link", "link", "replace", "fsync"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from tensorstow.base.new_file import NewFiles
made = NewFiles()
for name in ("a", "b"):
    with made.create(Path(sys.argv[1]) / name).stream() as stream:
        stream.write(bytes(1 << 20))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    done = children.run("-c", _KILLED, tmp_path, check=False)
    assert done.returncode == -9
    assert names_in(tmp_path) == []


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
