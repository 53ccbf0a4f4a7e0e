"""Files in pieces: what was written is what is mapped, and a replaced file is whole or the old."""

import errno
import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from process_counts import open_descriptors
from tensorstow.base.errors import DirectoryError, TransferError
from tensorstow.io import mapped as module
from tensorstow.io.digest_list import DigestList, verify
from tensorstow.io.mapped import Mapped, drop_pages, new_safetensors, scratch_pieces
from tensorstow.io.safetensors import Entry, Table, lay_out

MIB = 1 << 20


def table_of(nbytes: int = 4) -> Table:
    return lay_out({"a": Entry(torch.uint8, (nbytes,))})


def test_pieces_at_any_byte_come_back_as_memory(tmp_path: Path) -> None:
    wanted = torch.randn(1000)
    with scratch_pieces(tmp_path, 64 + 4000) as file:
        for start in (500, 0, 997, 250):
            stop = {500: 997, 0: 250, 997: 1000, 250: 500}[start]
            file.write(wanted[start:stop], 64 + 4 * start)
        mapped = file.map()
    assert torch.equal(mapped.tensor(64, (10, 100), torch.float32), wanted.view(10, 100))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float64, torch.bool])
def test_every_dtype_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(33).to(dtype)
    with scratch_pieces(tmp_path, 300) as file:
        file.write(values[:0], 0)
        file.write(values.view(3, 11).t(), 8)
        mapped = file.map()
    assert torch.equal(mapped.tensor(8, (11, 3), dtype), values.view(3, 11).t())


def test_tensors_may_be_changed_and_outlive_everything(tmp_path: Path) -> None:
    with scratch_pieces(tmp_path, 8192) as file:
        file.write(torch.ones(2048), 0)
        mapped = file.map()
    a, b = mapped.tensor(0, (1024,), torch.float32), mapped.tensor(4096, (1024,), torch.float32)
    del mapped, file
    gc.collect()
    a.mul_(2)
    assert (a == 2).all()
    assert (b == 1).all()
    assert a.untyped_storage().nbytes() == 4096  # what saves one does not save the other


@pytest.mark.usefixtures("garbage_apart")
def test_a_mapping_goes_with_its_tensors(tmp_path: Path) -> None:
    before = open_descriptors()
    with scratch_pieces(tmp_path, MIB) as file:
        tensor = file.map().tensor(0, (4,), torch.float32)
    assert open_descriptors() == before + 1
    del tensor
    gc.collect()
    assert open_descriptors() == before


def test_nothing_maps_to_nothing(tmp_path: Path) -> None:
    with scratch_pieces(tmp_path, 0) as file:
        mapped = file.map()
    assert mapped.tensor(0, (0, 3), torch.float32).shape == (0, 3)


def test_what_is_read_is_private(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(16))
    Mapped.read(path).tensor(0, (4,), torch.float32).fill_(1.0)
    assert path.read_bytes() == bytes(16)


def test_writing_behind_a_window_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WINDOW", 4096)
    started: list[int] = []
    real = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: started.append(1) or real(*a))
    with scratch_pieces(tmp_path, 4 * 4096) as file:
        for block in range(4):
            file.write(torch.full((1024,), float(block)), 4096 * block)
        mapped = file.map()
    assert len(started) == 4
    assert mapped.tensor(0, (4096,), torch.float32)[::1024].tolist() == [0, 1, 2, 3]


def test_short_writes_go_on_and_failed_ones_say_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: real(fd, view[:7], at))
    with scratch_pieces(tmp_path, 400) as file:
        file.write(torch.arange(100.0), 0)
        assert torch.equal(file.map().tensor(0, (100,), torch.float32), torch.arange(100.0))

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(TransferError, match=r"write of 40 bytes at offset 8 .* ENOSPC"):
            file.write(torch.zeros(10), 8)
        monkeypatch.setattr(os, "pwrite", lambda *_: 0)
        with pytest.raises(TransferError, match="EIO"):
            file.write(torch.zeros(10), 8)


def test_more_than_the_disk_has_is_refused_with_sizes(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"1\.0 PiB"):
        scratch_pieces(tmp_path, 1 << 50)
    with (
        pytest.raises(DirectoryError, match=r"1\.0 PiB"),
        new_safetensors(tmp_path / "x", table_of(1 << 50), DigestList(tmp_path / "x")),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, {"write": "pwrite"}.get(moment, moment), broken)
    with (
        pytest.raises(OSError, match=r"EIO|Input/output"),
        new_safetensors(path, table_of(), DigestList(path)) as file,
    ):
        file.put("a", torch.zeros(1))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_file_is_durable_before_it_takes_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    log: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, r=real: log.append(n) or r(*a))
    with new_safetensors(path, table_of(), DigestList(path)) as file:
        file.put("a", torch.zeros(1))
        assert path.read_text() == "old"
    assert log == ["fsync", "replace", "fsync"]
    assert path.read_bytes() == table_of().header + bytes(4)
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_the_list_that_is_written_after_a_file_is_of_its_bytes_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "x"
    listed = DigestList(path)
    listed.path.write_text("of an older file")
    with new_safetensors(path, table_of(3), listed) as file:
        for start in (2, 0, 1):
            file.put("a", torch.full((1,), start, dtype=torch.uint8), start)
        assert listed.path.exists()
    assert not listed.path.exists()
    listed.write()
    verify(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_path_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "x", tmp_path):
        with (
            pytest.raises(DirectoryError, match="was requested"),
            new_safetensors(path, table_of(), DigestList(path)),
        ):
            pass


def test_dropped_pages_are_read_again_and_no_byte_beside_them(tmp_path: Path) -> None:
    page, path = mmap.PAGESIZE, tmp_path / "file"
    path.write_bytes(bytes([1]) * 4 * page)
    whole = Mapped.read(path).tensor(0, (4 * page,), torch.uint8)
    whole.fill_(2)
    drop_pages(whole[page // 2 : 3 * page + page // 2])
    dropped = slice(page, 3 * page)
    assert (whole[dropped] == 1).all()
    assert (whole[:page] == 2).all()
    assert (whole[3 * page :] == 2).all()
    drop_pages(whole[1 : page - 1])  # no whole page
    assert (whole[:page] == 2).all()
