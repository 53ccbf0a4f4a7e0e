"""Heads: what a data file knows of the manifest, and what of both together is legal."""

from pathlib import Path

import pytest

from tensorstow.base.errors import DamageError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import open_file
from tensorstow.store.datafiles import Label
from tensorstow.store.durability import SystemDisk
from tensorstow.store.heads import (
    Head,
    find_difference,
    first_pages,
    parse_head,
    put_head,
    read_head,
    sync_heads,
)


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
