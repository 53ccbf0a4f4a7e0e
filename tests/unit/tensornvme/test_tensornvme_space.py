"""Room on disk: what is taken does not overlap, what is given is used again."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstow import _native
from tensorstow.base.errors import DirectoryError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import ALIGN, scratch_file
from tensorstow.tensornvme.space import FreeRuns, ScratchSpace

MIB = 1 << 20


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 99)), max_size=60))
def test_runs_agree_with_a_map_of_every_block(program: list[tuple[bool, int, int]]) -> None:
    runs, taken, owner_of = FreeRuns(), [], set[int]()
    for takes, size, pick in program:
        if takes:
            offset = runs.find(size)
            runs.take(offset, size)
            blocks = range(offset, offset + size)
            assert owner_of.isdisjoint(blocks)
            owner_of |= set(blocks)
            taken.append(blocks)
        elif taken:
            blocks = taken.pop(pick % len(taken))
            owner_of -= set(blocks)
            runs.give(blocks.start, len(blocks))
        free = {block for start, stop in runs._runs for block in range(start, stop)}
        assert free == set(range(runs.end)) - owner_of
        assert all(a[1] < b[0] for a, b in zip(runs._runs, runs._runs[1:], strict=False))


def test_the_first_run_that_fits_is_taken_and_the_last_may_grow() -> None:
    runs = FreeRuns()
    for offset, size in ((0, 4), (4, 2), (6, 4), (10, 2)):
        assert runs.find(size) == offset
        runs.take(offset, size)
    runs.give(0, 4)
    runs.give(6, 4)
    assert [runs.find(size) for size in (2, 4, 5)] == [0, 0, 12]
    runs.give(10, 2)
    assert runs.find(20) == 6


def space_in(directories: list[Path]) -> ScratchSpace:
    engine = open_engine("threads", depth=1)
    for directory in directories:
        directory.mkdir(exist_ok=True)
    return ScratchSpace([scratch_file(engine, d, ALIGN) for d in directories])


def test_a_large_tensor_is_cut_over_all_files_and_small_ones_take_turns(tmp_path: Path) -> None:
    space = space_in([tmp_path / str(i) for i in range(3)])
    large = space.take(6 * MIB + 5)
    assert [e.file for e in large] == [0, 1, 2]
    assert [(e.start, e.stop) for e in large[1:]] == [
        (large[0].stop, large[1].stop),
        (large[1].stop, 6 * MIB + 5),
    ]
    assert all(e.offset % ALIGN == 0 and e.start % ALIGN == 0 for e in large)
    assert [space.take(100)[0].file for _ in range(4)] == [0, 1, 2, 0]
    assert space.take(0) == ()
    space.close()


def test_room_is_used_again(tmp_path: Path) -> None:
    space = space_in([tmp_path])
    first = space.take(3 * MIB)
    space.take(ALIGN)
    space.give(first)
    assert space.take(3 * MIB) == first
    space.close()


def test_a_full_disk_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_in([tmp_path / "a", tmp_path / "b"])
    real = _native.fallocate
    calls = []

    def full_at_the_second(fd: int, length: int) -> int:
        calls.append(length)
        return real(fd, length) if len(calls) == 1 else 28

    monkeypatch.setattr(_native, "fallocate", full_at_the_second)
    with pytest.raises(DirectoryError, match="No space left"):
        space.take(40 * MIB)
    monkeypatch.undo()
    assert [e.offset for e in space.take(40 * MIB)] == [0, 0]
    space.close()
