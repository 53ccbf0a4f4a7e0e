"""Bytes over several drives, in shares by their rates."""

from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import DirectoryError
from tensorstow.io import scratch
from tensorstow.io.files import ALIGN
from tensorstow.io.scratch import FileTurns, StripedFiles


def shared(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    monkeypatch.setattr(scratch, "drive_shares", lambda _: list(shares))


def folders(tmp_path: Path, count: int) -> list[Path]:
    paths = [tmp_path / str(n) for n in range(count)]
    for path in paths:
        path.mkdir()
    return paths


@pytest.mark.parametrize("shares", [(0.5, 0.5), (2 / 3, 1 / 3), (0.1, 0.6, 0.3)])
def test_turns_give_each_file_its_share_of_the_bytes(shares: tuple[float, ...]) -> None:
    turns, given = FileTurns(shares), [0] * len(shares)
    for number in range(600):
        nbytes = 1000 + 7 * (number % 13)
        given[turns.next(nbytes)] += nbytes
    assert given == pytest.approx([share * sum(given) for share in shares], rel=0.01)


def test_turns_of_equal_files_go_round() -> None:
    turns = FileTurns([1.0, 1.0, 1.0])
    assert [turns.next(10) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), (2 / 3, 1 / 3), (0.1, 0.6, 0.3)])
@pytest.mark.parametrize("pages", [1, 2, 3, 100])
def test_a_buffer_comes_back_from_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: tuple[float, ...], pages: int
) -> None:
    shared(monkeypatch, *shares)
    files = StripedFiles(folders(tmp_path, len(shares)), 0)
    generator = torch.Generator().manual_seed(0)
    aligned = torch.empty(2 * pages * ALIGN + ALIGN, dtype=torch.uint8)
    start = -aligned.data_ptr() % ALIGN
    both = aligned[start : start + 2 * pages * ALIGN].random_(0, 256, generator=generator)
    kept = both.clone()
    buffers = both.chunk(2)
    places = [files.allocate(pages * ALIGN) for _ in buffers]
    for stripes, memory in zip(places, buffers, strict=True):
        assert [s.begin for s in stripes] == [0, *(s.end for s in stripes[:-1])]
        assert stripes[-1].end == pages * ALIGN
        for write in files.write(stripes, memory):
            write.wait()
    both.zero_()
    for stripes, memory in zip(places, buffers, strict=True):
        for read in files.read(stripes, memory):
            read.wait()
    assert torch.equal(both, kept)
    if pages == 100:
        parts = [s.end - s.begin for s in places[0]]
        assert parts == pytest.approx([share * pages * ALIGN for share in shares], abs=ALIGN)
    files.close()
    files.close()


def test_parts_on_one_drive_do_not_wait_for_those_on_a_late_one(tmp_path: Path) -> None:
    files = StripedFiles(folders(tmp_path, 2), 0)
    memory = torch.zeros(64, 2 * ALIGN, dtype=torch.uint8)
    places = [files.allocate(2 * ALIGN) for _ in memory]
    for stripes, row in zip(places, memory, strict=True):
        for write in files.write(stripes, row):
            write.wait()
    late = files._files[0].engine
    late.inject_fault("read", times=-1, delay_us=50_000)
    parts = [files.read(stripes, row) for stripes, row in zip(places, memory, strict=True)]
    for _, second in parts:
        second.wait()
    assert not parts[-1][0].done()
    late.clear_faults()
    for first, _ in parts:
        first.wait()
    files.close()


def test_a_directory_that_cannot_be_used_leaves_no_file_open(tmp_path: Path) -> None:
    [there] = folders(tmp_path, 1)
    with pytest.raises(DirectoryError):
        StripedFiles([there, tmp_path / "missing"], ALIGN)


def test_messages_name_each_part(tmp_path: Path) -> None:
    first, second = folders(tmp_path, 2)
    files = StripedFiles([first, second], 4 * ALIGN)
    told = files.describe(files.allocate(4 * ALIGN))
    assert f"at offset 0 of {first}/" in told
    assert f"and at offset 0 of {second}/" in told
    files.close()
