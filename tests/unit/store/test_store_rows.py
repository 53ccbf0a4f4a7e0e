"""Records to rows and back."""

import itertools
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstow.base.errors import OptionError
from tensorstow.store.records import ChunkRecord, Content, Extent, TensorRecord
from tensorstow.store.rows import (
    delete_generations,
    digest_of,
    insert_generation,
    insert_name,
    read_directories,
    read_extents,
    read_generation,
    read_summaries,
    to_json,
)
from tensorstow.store.schema import TABLES


@pytest.fixture
def connection() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(TABLES)
    return connection


def content_of(step: int) -> Content:
    return Content(
        step=step,
        layout={"chunks": []},
        hyper=[{"lr": 1e-5}],
        extra={"a": [1, None]},
        chunks=tuple(
            ChunkRecord(k, Extent(k, 4096 * step, 8192), k == 1, b"\0\1\2\xff", b"w")
            for k in (0, 1)
        ),
        tensors=(
            TensorRecord("buffer", "mean", "float32", (2, 3), Extent(0, 1 << 40, 4096), 0xFFFFFFFF),
            TensorRecord("extra", "none", "bool", (0, 3), Extent(0, 0, 0), 0),
        ),
    )


def test_a_generation_comes_back(connection: sqlite3.Connection) -> None:
    number = insert_generation(connection, "run", content_of(3), 12.5)
    for name in ("b", "a"):
        insert_name(connection, "run", name, number)
    (summary,) = read_summaries(connection)
    assert (summary.number, summary.step, summary.created) == (number, 3, 12.5)
    assert summary.names == ("a", "b")
    assert (summary.chunk_count, summary.bytes) == (2, 2 * 8192 + 4096)
    found = read_generation(connection, "run", number)
    wanted = content_of(3)
    assert (found.names, found.number) == (summary.names, number)
    assert (found.chunks, found.tensors) == (wanted.chunks, wanted.tensors)
    assert (found.layout, found.hyper, found.extra) == (wanted.layout, wanted.hyper, wanted.extra)
    assert found.extents() == wanted.extents()
    assert read_extents(connection) == {number: wanted.extents()}


def test_numbers_are_never_used_twice(connection: sqlite3.Connection) -> None:
    numbers = []
    for step in range(4):
        numbers.append(insert_generation(connection, "run", content_of(step), 0.0))
        delete_generations(connection, numbers[-1:])
    assert numbers == [1, 2, 3, 4]
    for table in ("generations", "chunks", "tensors", "layouts"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)  # noqa: S608


def test_directories_in_their_order(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO files VALUES (1, '/b'), (0, '/z')")
    assert read_directories(connection) == [Path("/z"), Path("/b")]


def test_what_json_cannot_hold() -> None:
    with pytest.raises(OptionError, match="whose hyper cannot be kept"):
        to_json({1, 2}, "hyper")


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
