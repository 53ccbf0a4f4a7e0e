"""Safetensors that stay open: tensors from where they lie, and files that change meanwhile."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tensorstow import save_safetensors
from tensorstow.base.errors import DamageError, TransferError
from tensorstow.checkpoint import weight_files
from tensorstow.checkpoint.weight_files import SeenFile, WeightFile, WeightFiles
from tensorstow.io.digest_list import DigestList
from tensorstow.io.files import File

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


def test_a_time_that_was_set_back_hides_nothing(opened: WeightFile) -> None:
    seen = opened.path.stat()
    with opened.path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(opened.path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert opened.path.stat().st_mtime_ns == seen.st_mtime_ns
    for _ in range(2):
        with pytest.raises(DamageError, match="was changed while a model is computed with"):
            opened.validate_unchanged()


@pytest.mark.parametrize("lists", [True, False])
def test_a_digest_says_whether_the_contents_were_changed(
    tmp_path: Path,
    lists: bool,  # noqa: FBT001
) -> None:
    save_safetensors(nn.Linear(64, 64), tmp_path)
    path = tmp_path / "model.safetensors"
    if not lists:
        DigestList(path).remove()
    opened = WeightFiles([path]).by_path[path]
    path.chmod(0o640)
    if lists:
        opened.validate_unchanged()
    else:
        with pytest.raises(DamageError, match="was changed"):
            opened.validate_unchanged()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamageError, match="was changed"):
        opened.validate_unchanged()


@pytest.mark.parametrize("change", ["write", "rename", "unlink", "none"])
def test_a_file_that_is_opened_again_must_be_the_same(tmp_path: Path, change: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    facts, seen = path.stat(), SeenFile(path)
    if change == "write":
        with path.open("r+b") as file:
            file.write(b"x")
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    elif change == "rename":
        save_file(TENSORS, tmp_path / "other")
        os.utime(tmp_path / "other", ns=(facts.st_atime_ns, facts.st_mtime_ns))
        (tmp_path / "other").rename(path)
    elif change == "unlink":
        path.unlink()
    if change == "none":
        seen.validate_unchanged()
        return
    with pytest.raises((DamageError, TransferError), match=r"was changed|No such file"):
        seen.validate_unchanged()


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
    opened.validate_unchanged()
    fd = os.open(f"/proc/self/fd/{opened._file.fd}", os.O_WRONLY)
    seen = os.fstat(fd)
    os.pwrite(fd, b"x", seen.st_size - 1)
    os.utime(fd, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    os.close(fd)
    with pytest.raises(DamageError, match="was changed"):  # its last name is lost once
        opened.validate_unchanged()


def test_the_table_is_that_of_the_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    save_file({"a": torch.zeros(3)}, tmp_path / "other")
    open_file = weight_files.open_file

    def replaced_meanwhile(*given: Any, **options: Any) -> File:  # noqa: ANN401
        file = open_file(*given, **options)
        (tmp_path / "other").rename(path)
        return file

    monkeypatch.setattr(weight_files, "open_file", replaced_meanwhile)
    file = WeightFiles([path]).by_path[path]
    assert torch.equal(read(file, "a"), TENSORS["a"])


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("way", ["rename", "unlink"])
def test_a_digest_says_whether_a_file_that_lost_its_name_was_written_to(
    tmp_path: Path,
    way: str,
    is_written: bool,  # noqa: FBT001
) -> None:
    save_safetensors(nn.Linear(64, 64), tmp_path)
    path = tmp_path / "model.safetensors"
    opened = WeightFiles([path]).by_path[path]
    seen = path.stat()
    if is_written:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    if way == "rename":
        save_safetensors(nn.Linear(3, 3), tmp_path)
    else:
        path.unlink()
    if not is_written:
        opened.validate_unchanged()
        return
    for _ in range(2):
        with pytest.raises(DamageError, match="was changed"):
            opened.validate_unchanged()
