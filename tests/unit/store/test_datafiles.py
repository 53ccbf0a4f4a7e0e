"""Labels of data files, and heads: whose they are, and what they know of the manifest."""

from pathlib import Path

import pytest

from tensorstow.base.errors import DamageError, StoreFormatError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import open_file
from tensorstow.store.datafiles import (
    Head,
    Label,
    check_files,
    check_unused,
    create_files,
    data_path,
    find_difference,
    first_pages,
    parse_head,
    put_head,
    read_head,
    read_label,
    sync_heads,
)
from tensorstow.store.durability import SystemDisk


def test_a_label_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    label = Label("1b2c", 1, 3)
    path.write_bytes(label.page())
    assert len(label.page()) == 4096
    assert read_label(path) == label
    for other in (b"", b"\0" * 4096, label.page()[:-1] + b"x", b"tensorstow states 2\n"):
        path.write_bytes(other)
        assert read_label(path) is None


def test_files_are_checked_against_their_run(tmp_path: Path) -> None:
    create_files(SystemDisk(), "mine", [tmp_path])
    check_files("mine", [tmp_path])
    with pytest.raises(StoreFormatError, match="of run yours; it is file 0 of 1 of run mine"):
        check_files("yours", [tmp_path])
    data_path(tmp_path, 0).unlink()
    with pytest.raises(StoreFormatError, match="there is no such file"):
        check_files("mine", [tmp_path])


@pytest.mark.parametrize("byte", [0, 20, 27, 4095], ids=["mark", "word", "run", "filling"])
def test_a_damaged_header_is_called_that(byte: int, tmp_path: Path) -> None:
    create_files(SystemDisk(), "mine", [tmp_path])
    path = data_path(tmp_path, 0)
    page = bytearray(path.read_bytes())
    page[byte] ^= 0x80
    path.write_bytes(page)
    with pytest.raises(DamageError, match=r"its header, 4096 bytes .* is damaged") as caught:
        check_files("mine", [tmp_path])
    assert str(path) in str(caught.value)
    assert "copy of the directories" in str(caught.value)
    path.write_bytes(b"")
    with pytest.raises(DamageError, match=r"states-0\.bin.* is damaged"):
        check_files("mine", [tmp_path])


TORN = b"\0" * 4096 + Head("dead").page()[:700]


@pytest.mark.parametrize("left", [b"", b"\0" * 4096, Label("dead", 0, 2).page(), TORN])
def test_what_a_store_that_was_being_made_leaves_is_nobodys(left: bytes, tmp_path: Path) -> None:
    data_path(tmp_path, 0).write_bytes(left)
    check_unused([tmp_path])


@pytest.mark.parametrize("there", [b"x", b"\0" * 12289, Label("live", 0, 2).page() + b"\0" * 8193])
def test_what_somebody_may_miss(there: bytes, tmp_path: Path) -> None:
    data_path(tmp_path, 0).write_bytes(there)
    with pytest.raises(StoreFormatError, match="has no manifest; but there is"):
        check_unused([tmp_path])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "states-0.bin"
    path.write_bytes(Label("mine", 0, 1).page() + first_pages("mine"))
    return path


def test_heads_take_turns_and_the_newer_one_counts(path: Path) -> None:
    assert read_head(path, "mine") == Head("mine")
    with open_file(open_engine("threads"), path) as file:
        for number in range(1, 6):
            sync_heads(SystemDisk(), [file], Head("mine", number, number, 10 * number))
            assert read_head(path, "mine") == Head("mine", number, number, 10 * number)
    assert path.stat().st_size == 3 * 4096
    put_head(path, Head("mine", 6, 5, 50))
    assert read_head(path, "mine").transaction == 6
    with pytest.raises(DamageError, match="8192 bytes at offset 4096, are damaged"):
        read_head(path, "yours")


@pytest.mark.parametrize("byte", [0, 20, 90, 200, 4095])
def test_a_damaged_one_leaves_the_one_before(byte: int, path: Path) -> None:
    put_head(path, Head("mine", 1, 1, 5))
    put_head(path, Head("mine", 2, 2, 6))
    data = bytearray(path.read_bytes())
    data[4096 + byte] ^= 0x10  # transaction 2 is in the first slot
    path.write_bytes(data)
    assert read_head(path, "mine") == Head("mine", 1, 1, 5)
    assert parse_head(bytes(data[4096:8192])) is None


def test_what_is_legal(path: Path) -> None:
    heads = [(path, Head("mine", 5, 3, 30)), (path, Head("mine", 4, 3, 30))]
    assert find_difference(heads, 5) is None
    assert find_difference(heads[:1], 6) is None
    assert "has lost what was reported" in (find_difference(heads, 4) or "")
    assert "an older copy by that" in (find_difference(heads, 6) or "")
    assert "no commit yet" in (find_difference([(path, Head("mine", 9))], 1) or "")
