"""Scratch files of states: chunks go round directories; later ones have files of their own."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import DirectoryError
from tensorstow.io.scratch import GROWTH_BYTES
from tensorstow.states import scratch
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.scratch import ScratchStorage, open_scratch

BLOCK = 4096
POLICY = PipelinePolicy(backend="threads", depth=1)


def storage_in(*directories: Path) -> ScratchStorage:
    for directory in directories:
        directory.mkdir(exist_ok=True)
    return ScratchStorage(directories, POLICY, moving=True)


def test_chunks_are_shared_among_the_directories_by_bytes_and_do_not_overlap(
    tmp_path: Path,
) -> None:
    storage = storage_in(tmp_path / "a", tmp_path / "b")
    widths = [3 * BLOCK, BLOCK, 2 * BLOCK, 5 * BLOCK, BLOCK]
    places = storage.reserve(widths)
    first, second = (file for file, _ in places[:2])
    assert [file for file, _ in places] == [first, second, second, first, second]
    ends = sorted((*place, width) for place, width in zip(places, widths, strict=True))
    for (file, offset, width), (other, later, _) in pairwise(ends):
        assert file != other or offset + width <= later
    assert storage.path(second).parent == tmp_path / "b"
    assert storage.directories == (tmp_path / "a", tmp_path / "b")
    storage.close()
    storage.close()


def test_chunks_follow_the_rates_of_the_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "drive_shares", lambda _: [0.75, 0.25])
    storage = storage_in(tmp_path / "a", tmp_path / "b")
    places = storage.reserve([BLOCK] * 40)
    files = [file for file, _ in places]
    assert [files.count(number) for number in dict.fromkeys(files)] == [30, 10]
    storage.close()


def test_chunks_that_come_later_have_files_of_their_own(tmp_path: Path) -> None:
    storage = storage_in(tmp_path)
    [(before, _)], [(after, offset)] = storage.reserve([BLOCK]), storage.reserve([BLOCK])
    assert before != after
    assert offset == 0
    assert storage.file(before).engine is storage.file(after).engine
    assert storage.reserve([]) == []
    storage.close()


def test_a_missing_directory_leaves_nothing_behind(tmp_path: Path) -> None:
    storage = ScratchStorage([tmp_path, tmp_path / "missing"], POLICY, moving=True)
    with pytest.raises(DirectoryError):
        storage.reserve([BLOCK, BLOCK])
    assert storage.directories == ()
    storage.close()


def test_what_is_expected_is_reserved(tmp_path: Path) -> None:
    files = open_scratch([tmp_path], GROWTH_BYTES + 1, POLICY)
    assert (files.nbytes, files.used_bytes) == (2 * GROWTH_BYTES, 0)
    files.close()


def test_a_read_that_is_late_on_one_drive_is_not_before_one_of_the_other(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    files = open_scratch(directories, 0, PipelinePolicy(backend="threads"))
    extents = [files.allocate(BLOCK) for _ in range(64)]
    memory = torch.zeros(len(extents), BLOCK, dtype=torch.uint8)
    for extent, row in zip(extents, memory, strict=True):
        files.write(extent, row).wait()
    late = files.files[0].engine
    late.inject_fault("read", times=-1, delay_us=200_000)
    # All of the late drive's are asked for first: more than its engine has in flight.
    order = sorted(range(len(extents)), key=lambda number: extents[number].file)
    reads = [files.read(extents[number], memory[number]) for number in order]
    for read in reads[32:]:
        read.wait()
    assert not any(read.done() for read in reads[16:32])
    late.clear_faults()
    for read in reads[:32]:
        read.wait()
    files.close()


def test_a_chosen_directory_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    files = open_scratch([], BLOCK, POLICY)
    assert str(tmp_path) in caplog.text
    files.close()
