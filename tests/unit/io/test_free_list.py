"""Free byte ranges against a set of every byte that is free."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstow.io.free_list import FreeList


@given(st.lists(st.integers(0, 40), unique=True), st.lists(st.integers(1, 5), max_size=30))
@settings(deadline=None)
def test_ranges_are_what_a_set_of_pages_is(freed: list[int], wanted: list[int]) -> None:
    free, pages = FreeList(), set(freed)
    for page in freed:
        free.add(page, page + 1)
    for count in wanted:
        start = free.allocate(count)
        fits = [s for s in sorted(pages) if pages >= set(range(s, s + count))]
        assert start == (fits[0] if fits else None)
        if start is not None:
            pages -= set(range(start, start + count))
    assert free.nbytes == len(pages)
    assert all(b > a for a, b in zip(free._ends, free._starts[1:], strict=False))


def test_trailing_bytes_are_those_before_an_end() -> None:
    free = FreeList()
    assert free.trailing(0) == 0
    free.add(3, 7)
    assert (free.trailing(7), free.trailing(8)) == (4, 0)
