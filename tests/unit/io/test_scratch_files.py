"""Scratch files: extents do not overlap, free bytes are used again, a full disk is an error."""

import errno
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorstow import _native
from tensorstow.base.errors import DirectoryError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import ALIGN
from tensorstow.io.scratch import GROWTH_BYTES, ScratchExtent, ScratchFiles

MIB = 1 << 20


def files_in(directories: list[Path], sizes: list[int]) -> ScratchFiles:
    for directory in directories:
        directory.mkdir(exist_ok=True)
    engine = open_engine("threads", depth=1)
    return ScratchFiles([engine] * len(directories), directories, sizes)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 99)), max_size=40))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_extents_never_overlap(tmp_path: Path, program: list[tuple[bool, int, int]]) -> None:
    files = files_in([tmp_path / "a", tmp_path / "b"], [0, 8 * ALIGN])
    taken: list[ScratchExtent] = []
    for takes, blocks, pick in program:
        if takes:
            taken.append(files.allocate(blocks * ALIGN - 1))
        elif taken:
            files.release([taken.pop(pick % len(taken))])
        ranges = sorted((e.file, e.offset, e.offset + e.nbytes) for e in taken)
        for one, other in pairwise(ranges):
            assert one[0] != other[0] or one[2] <= other[1]
        assert all(e.offset % ALIGN == 0 for e in taken)
    files.close()


def test_extents_go_round_the_files_and_fill_what_is_reserved(tmp_path: Path) -> None:
    files = files_in([tmp_path / "a", tmp_path / "b"], [4 * ALIGN, 4 * ALIGN])
    extents = [files.allocate(2 * ALIGN) for _ in range(4)]
    assert [(e.file, e.offset) for e in extents] == [(0, 0), (1, 0), (0, 2 * ALIGN), (1, 2 * ALIGN)]
    assert files.nbytes == 8 * ALIGN
    assert files.allocate(ALIGN).offset == 4 * ALIGN
    assert files.nbytes == 8 * ALIGN + GROWTH_BYTES
    files.close()


def test_bytes_come_back(tmp_path: Path) -> None:
    files = files_in([tmp_path / "a", tmp_path / "b"], [0, 0])
    sent = [torch.full((ALIGN,), i, dtype=torch.uint8) for i in range(5)]
    taken = [files.allocate(ALIGN) for _ in sent]
    assert files.used_bytes == 5 * ALIGN
    for extent, tensor in zip(taken, sent, strict=True):
        files.write(extent, tensor).wait()
    for extent, tensor in zip(taken, sent, strict=True):
        back = torch.empty_like(tensor)
        files.read(extent, back).wait()
        assert torch.equal(back, tensor)
    files.release(taken[1:])
    assert files.used_bytes == ALIGN
    files.close()


def test_a_released_extent_is_used_again(tmp_path: Path) -> None:
    files = files_in([tmp_path / "a"], [0])
    first = files.allocate(3 * MIB)
    files.allocate(1)
    files.release([first])
    assert files.allocate(3 * MIB) == first
    files.close()


def test_what_is_written_to_an_extent_is_read_from_it(tmp_path: Path) -> None:
    files = files_in([tmp_path / "a"], [0])
    extent = files.allocate(2 * ALIGN)
    values = torch.arange(2 * ALIGN // 4, dtype=torch.int32)
    files.files[extent.file].write(values, extent.offset).wait()
    found = torch.empty_like(values)
    files.files[extent.file].read(found, extent.offset).wait()
    assert torch.equal(found, values)
    files.close()


def test_a_file_grows_by_less_where_the_disk_has_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_in([tmp_path / "a"], [ALIGN])
    real, asked = _native.fallocate, []

    def nearly_full(fd: int, length: int) -> int:
        asked.append(length)
        return errno.ENOSPC if length > 4 * ALIGN else real(fd, length)

    monkeypatch.setattr(_native, "fallocate", nearly_full)
    assert files.allocate(4 * ALIGN).offset == 0  # the block that was free is the first of them
    assert asked == [ALIGN + GROWTH_BYTES, 4 * ALIGN]
    with pytest.raises(DirectoryError, match="No space left"):
        files.allocate(ALIGN)
    assert files.nbytes == 4 * ALIGN
    files.close()


def test_a_missing_directory_leaves_no_file_open(tmp_path: Path) -> None:
    engine = open_engine("threads", depth=1)
    with pytest.raises(DirectoryError):
        ScratchFiles([engine] * 2, [tmp_path, tmp_path / "missing"], [ALIGN, ALIGN])
