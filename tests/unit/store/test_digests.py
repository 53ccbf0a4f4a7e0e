"""Digests: any value of any type that is another gives another one."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tensorstow.store.rows import digest_of

VALUES = st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary()
ROWS = st.lists(st.tuples(VALUES, VALUES), max_size=3)


def test_types_and_borders_count() -> None:
    tables: list[list[tuple[object, ...]]] = [
        [(1,)], [(1.0,)], [("1",)], [(b"1",)], [(None,)], [("None",)], [(True,)], [], [()],
        [(b"ab", b"c")], [(b"a", b"bc")], [(b"ab",), (b"c",)], [("ab", "c")], [("a", "bc")],
    ]  # fmt: skip
    found = [digest_of(rows) for rows in tables]
    assert all(a != b for a, b in itertools.combinations(found, 2))
    assert digest_of([(1,)], []) != digest_of([], [(1,)])


@given(ROWS, ROWS)
def test_equal_rows_have_equal_digests(one: list[object], other: list[object]) -> None:
    assert (digest_of(one) == digest_of(other)) == (repr(one) == repr(other))  # type: ignore[arg-type]
