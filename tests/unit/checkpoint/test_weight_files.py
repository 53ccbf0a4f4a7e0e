"""Safetensors that stay open: tensors from where they lie, and files that change meanwhile."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tensorstow.base.errors import DamageError, TransferError
from tensorstow.checkpoint.weight_files import WeightFile, WeightFiles

TENSORS = {"a": torch.arange(5000.0), "b": torch.arange(300, dtype=torch.bfloat16)}


@pytest.fixture
def opened(tmp_path: Path) -> WeightFile:
    """Return an open file of ``TENSORS``."""
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return WeightFiles([path, path]).by_path[path]


def read(file: WeightFile, name: str) -> torch.Tensor:
    entry = file.entries[name]
    into = torch.empty(entry.nbytes, dtype=torch.uint8)
    file.read(entry.offset, into).wait()
    return into.view(entry.dtype)


def test_tensors_are_read_from_where_they_lie(opened: WeightFile) -> None:
    assert any(entry.offset % 4096 for entry in opened.entries.values())
    for name, values in TENSORS.items():
        assert torch.equal(read(opened, name), values)
    opened.validate_unchanged()


def test_a_file_that_was_written_to_is_told(opened: WeightFile) -> None:
    with opened.path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(opened.path, ns=(0, 0))  # whatever the clock's ticks are
    with pytest.raises(DamageError, match="was changed while a model is computed with"):
        opened.validate_unchanged()


def test_a_file_that_was_cut_is_told(opened: WeightFile) -> None:
    os.truncate(opened.path, 100)
    with pytest.raises(TransferError, match="the end of the file"):
        read(opened, "a")
    with pytest.raises(DamageError, match=r"model\.safetensors was changed"):
        opened.validate_unchanged()


def test_a_file_that_another_replaced_is_still_read(opened: WeightFile, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "other")
    (tmp_path / "other").rename(opened.path)
    assert torch.equal(read(opened, "a"), TENSORS["a"])
    opened.validate_unchanged()
