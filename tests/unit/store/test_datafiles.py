"""Labels of data files: whose they are, and what is nobody's."""

from pathlib import Path

import pytest

from tensorstow.base.errors import DamageError, StoreFormatError
from tensorstow.store.datafiles import (
    Label,
    check_files,
    check_unused,
    create_files,
    data_path,
    read_label,
)
from tensorstow.store.durability import SystemDisk
from tensorstow.store.heads import Head


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
