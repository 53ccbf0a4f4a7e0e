"""Who has which extent."""

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.store.records import HEADER_BYTES, PAGE, Extent
from tensorstow.store.space import Extents


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
