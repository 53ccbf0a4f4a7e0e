"""Lists of digests: any portions give one checksum, and every file is held against its own."""

import os
import random
from pathlib import Path

import pytest

from tensorstow.base.core_share import LocalRanks
from tensorstow.base.errors import DamageError, DirectoryError, StoreFormatError
from tensorstow.base.new_file import NewFile
from tensorstow.io import digest_list
from tensorstow.io.digest_list import DigestList, RunningDigest, digest_of, verify

PIECE = 64


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_list, "_PIECE_BYTES", PIECE)


@pytest.mark.parametrize("length", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 1000])
def test_the_digest_is_the_same_in_any_portions(tmp_path: Path, length: int) -> None:
    data = os.urandom(length)
    (tmp_path / "file").write_bytes(data)
    wanted = digest_of(tmp_path / "file")
    assert wanted.nbytes == length
    for seed in range(20):
        cuts = random.Random(seed).choices(range(length + 1), k=5)  # noqa: S311  # no secret
        running = RunningDigest()
        for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), length], strict=True):
            running.add(data[start:stop], start)
        assert running.digest() == wanted
    with pytest.raises(ValueError, match=f"those at {length} are next"):
        running.add(b"x", length + 1)


def written(folder: Path) -> Path:
    """Write a checkpoint of three files; return the one that is named."""
    listed = DigestList(folder / "main")
    for name in ("a", "b"):
        with NewFile(folder / name) as file:
            with listed.stream(file) as stream:
                stream.write(os.urandom(1000))
            file.publish()
    listed.write_main(lambda stream: stream.write(b"main"))
    return listed.main


def test_files_are_what_was_written_until_they_are_changed(tmp_path: Path) -> None:
    main = written(tmp_path)
    verify(main)
    for name in ("a", "b", "main"):
        file = tmp_path / name
        whole = file.read_bytes()
        for damaged in (whole[:-1], whole + b"x", bytes([whole[0] ^ 1]) + whole[1:]):
            file.write_bytes(damaged)
            with pytest.raises(DamageError, match=rf"/{name} has (another checksum|\d+ bytes)"):
                verify(main)
        file.unlink()
        with pytest.raises(DamageError, match=rf"/{name} is gone"):
            verify(main)
        file.write_bytes(whole)
    verify(main)


def test_every_byte_of_the_list_counts(tmp_path: Path) -> None:
    path = DigestList(written(tmp_path)).path
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(DamageError, match=r"main\.digests, which has the digests"):
                verify(tmp_path / "main")
        path.write_bytes(whole[:at])
        with pytest.raises(DamageError, match="damaged, cut short or of a newer version"):
            verify(tmp_path / "main")


def test_ranks_of_a_machine_share_the_files(tmp_path: Path) -> None:
    main = written(tmp_path)
    (tmp_path / "b").write_bytes(b"")
    verify(main, LocalRanks(3, 0))
    verify(main, LocalRanks(3, 2))
    for ranks in (LocalRanks(3, 1), LocalRanks(3, None), LocalRanks()):
        with pytest.raises(DamageError, match="/b has 0 bytes"):
            verify(main, ranks)


def test_a_list_names_files_of_its_directory_alone(tmp_path: Path) -> None:
    listed = DigestList(tmp_path / "folder" / "main")
    listed.main.parent.mkdir()
    (tmp_path / "file").touch()
    listed.digests["../file"] = digest_of(tmp_path / "file")
    listed.write()
    with pytest.raises(StoreFormatError, match=r"names '\.\./file', which is no file in"):
        verify(listed.main)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(DirectoryError, match=r"it is a (pipe|device|directory) where"):
            digest_of(path)
    with pytest.raises(DirectoryError, match="absent was requested: No such file"):
        digest_of(tmp_path / "absent")


def test_a_main_file_that_cannot_be_written_leaves_both(tmp_path: Path) -> None:
    main = written(tmp_path)
    with pytest.raises(TypeError):
        DigestList(main).write_main(lambda stream: stream.write("text"))  # type: ignore[arg-type]
    verify(main)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "main", "main.digests"]  # noqa: PTH208
