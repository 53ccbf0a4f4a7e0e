"""Room: files take turns and grow ahead; what is given back is used again."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File, scratch_file
from tensorstow.store.records import HEADER_BYTES, PAGE, Extent
from tensorstow.store.space import GROWTH_BYTES, Extents, StoreSpace

MIB = 1 << 20


class Files:
    """Files that only remember what was reserved, up to a limit each."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit, self.asked = path, limit, list[int]()

    def reserve(self, nbytes: int) -> None:
        self.asked.append(nbytes)
        if nbytes > self.limit:
            message = f"{nbytes} are too many"
            raise DirectoryError(message)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(bytes(HEADER_BYTES))
    return tmp_path / "file"


def test_files_grow_ahead_and_in_turn(path: Path) -> None:
    files = [Files(path, 1 << 40) for _ in range(2)]
    space = StoreSpace(files, {})  # type: ignore[arg-type]
    extents = [space.allocate(MIB) for _ in range(8)]
    assert [e.file for e in extents] == [0, 1] * 4
    assert [f.asked for f in files] == [[HEADER_BYTES + GROWTH_BYTES]] * 2
    assert space.allocate(2 * GROWTH_BYTES).nbytes == 2 * GROWTH_BYTES


def test_the_end_of_a_file_is_used_before_it_grows(path: Path) -> None:
    (file,) = files = [Files(path, HEADER_BYTES + 20 * MIB)]
    space = StoreSpace(files, {})  # type: ignore[arg-type]
    space.allocate(14 * MIB)
    space.allocate(6 * MIB)  # two are left, four are missing
    assert file.asked == [HEADER_BYTES + 16 * MIB, HEADER_BYTES + 32 * MIB, HEADER_BYTES + 20 * MIB]
    with pytest.raises(DirectoryError, match=r"extent of 4\.0 KiB was requested and no data file"):
        space.allocate(1)


def test_what_is_released_is_handed_out_again(path: Path) -> None:
    space = StoreSpace([Files(path, 1 << 40)], {})  # type: ignore[list-item]
    one, two = space.allocate(5000), space.allocate(5000)
    assert (one.nbytes, two.offset) == (8192, one.end)
    space.extents.release([one, Extent(0, 0, 0)])
    assert space.allocate(8192) == one
    space.extents.refer(1, [two])
    space.extents.release([two])
    assert space.allocate(8192) != two
    space.extents.adopt(two)
    space.extents.forget(1)
    space.extents.release([two])
    assert space.allocate(8192) == two
    with pytest.raises(OptionError, match="no kept generation"):
        space.extents.adopt(one)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[File]:
    with scratch_file(open_engine(), tmp_path, HEADER_BYTES) as file:
        yield file


def test_real_files_are_reserved(real: File, path: Path) -> None:
    real.path = path  # a scratch file has no name to ask the size of
    StoreSpace([real], {}).allocate(MIB)
    assert os.fstat(real.fd).st_size == HEADER_BYTES + GROWTH_BYTES


def test_what_generations_do_not_refer_to_is_free() -> None:
    kept = {
        1: [Extent(0, 4 * PAGE, PAGE)],
        2: [Extent(0, 6 * PAGE, PAGE), Extent(0, 4 * PAGE, PAGE)],
    }
    extents = Extents([10 * PAGE + 100, 10], kept)
    assert extents.free[0].nbytes == 7 * PAGE - 2 * PAGE
    assert extents.sizes == [10 * PAGE, HEADER_BYTES]  # the header, and whole pages
    assert extents.allocate(0, 2 * PAGE) == Extent(0, 7 * PAGE, 2 * PAGE)
    assert extents.allocate(0, PAGE) == Extent(0, HEADER_BYTES, PAGE)
    assert extents.allocate(1, PAGE) is None


def test_a_file_that_lost_its_end_is_not_used_there() -> None:
    extents = Extents([PAGE], {1: [Extent(0, 8 * PAGE, PAGE)]})
    assert extents.sizes == [9 * PAGE]
    extents.grow(0, 10 * PAGE)
    extents.grow(0, 2 * PAGE)  # never less
    assert extents.allocate(0, 8 * PAGE) is None
    assert extents.free[0].nbytes == 5 * PAGE + PAGE


def test_an_extent_is_free_when_nobody_has_it() -> None:
    extents = Extents([10 * PAGE], {})
    one = extents.allocate(0, PAGE)
    assert one is not None
    extents.hold([one])
    extents.refer(5, [one, one])
    extents.release([one])
    extents.release([one])
    assert extents.is_kept(one)
    with pytest.raises(OptionError, match="does not hold"):
        extents.release([one])
    extents.refer(6, [one])
    extents.forget(5)
    assert extents.in_use(one)
    extents.forget(6)
    assert not extents.in_use(one)
    assert extents.free[0].nbytes == 10 * PAGE - HEADER_BYTES
    with pytest.raises(OptionError, match="nobody holds it"):
        extents.hold([one])
