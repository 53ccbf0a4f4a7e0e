"""Tensors over several files: equal stripes, and nothing is kept where a disk is full."""

from pathlib import Path

import pytest

from tensorstow import _native
from tensorstow.base.errors import DirectoryError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import ALIGN
from tensorstow.io.scratch import ScratchFiles
from tensorstow.tensornvme.offload_table import release_stripes, take_stripes

MIB = 1 << 20


def files_in(directories: list[Path]) -> ScratchFiles:
    engine = open_engine("threads", depth=1)
    for directory in directories:
        directory.mkdir(exist_ok=True)
    return ScratchFiles([engine] * len(directories), directories, [ALIGN] * len(directories))


def test_a_large_tensor_is_cut_over_all_files_and_small_ones_take_turns(tmp_path: Path) -> None:
    files = files_in([tmp_path / str(i) for i in range(3)])
    (large,) = take_stripes(files, [6 * MIB + 5])
    assert [s.extent.file for s in large] == [0, 1, 2]
    assert [(s.start, s.stop) for s in large[1:]] == [
        (large[0].stop, large[1].stop),
        (large[1].stop, 6 * MIB + 5),
    ]
    assert all(s.extent.offset % ALIGN == 0 and s.start % ALIGN == 0 for s in large)
    # The last part of the large one is the smallest: its file takes more of the small ones first.
    assert [s[0].extent.file for s in take_stripes(files, [100] * 5)] == [2, 2, 0, 1, 2]
    assert take_stripes(files, [0]) == ((),)
    files.close()


def test_space_is_used_again(tmp_path: Path) -> None:
    files = files_in([tmp_path])
    first = take_stripes(files, [3 * MIB])
    take_stripes(files, [ALIGN])
    release_stripes(files, first)
    assert take_stripes(files, [3 * MIB]) == first
    files.close()


def test_a_full_disk_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in([tmp_path / "a", tmp_path / "b"])
    real = _native.fallocate
    calls = []

    def full_at_the_second(fd: int, length: int) -> int:
        calls.append(length)
        return real(fd, length) if len(calls) == 1 else 28

    monkeypatch.setattr(_native, "fallocate", full_at_the_second)
    with pytest.raises(DirectoryError, match="No space left"):
        take_stripes(files, [40 * MIB])
    monkeypatch.undo()
    assert [s.extent.offset for s in take_stripes(files, [40 * MIB])[0]] == [0, 0]
    files.close()
