"""Checks that the manifest's rows are those that were written.

[Note: Digests] in `rows`. No row is used before it is checked.
"""

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from tensorstow.base.errors import DamageError, StowError
from tensorstow.base.regular_file import regular_stream
from tensorstow.store.bounds import (
    check_disjoint,
    check_generation,
    check_schema,
    check_shared_rows,
    without_overlaps,
)
from tensorstow.store.datafiles import check_files, data_paths, find_difference, read_head
from tensorstow.store.records import Generation, chunk_shapes
from tensorstow.store.rows import check_seal, read_directories, read_generation
from tensorstow.store.schema import (
    check_marks,
    connect_to_read,
    damaged,
    read_failure,
    read_meta,
    with_suffix,
)

MALFORMED = (
    sqlite3.Error,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading rows may end in that are not those that were written."""


def check_shared(connection: sqlite3.Connection, path: Path) -> None:
    """Raise DamageError unless the rows that generations share match their seal."""
    try:
        check_seal(connection)
    except (DamageError, *MALFORMED) as error:
        raise damaged(path, str(error)) from error


def check_all(connection: sqlite3.Connection, path: Path) -> int:
    """Return the number of the last transaction; raise DamageError unless all rows are whole."""
    try:
        check_schema(connection)
    except (StowError, *MALFORMED) as error:
        # No row of other tables is read, not for the message either: a view may have no end.
        raise damaged(path, str(error)) from error
    try:
        (result,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if result != "ok":
            raise DamageError(str(result).replace("\n", " "))
        check_seal(connection)
        run = read_meta(connection, "run")
        check_disjoint([_read(connection, run, number) for number in _numbers(connection)])
        return check_shared_rows(connection, run)
    except (StowError, *MALFORMED) as error:
        reason = str(error) if isinstance(error, StowError) else repr(error)
        raise damaged(path, f"{reason}; {describe_whole(connection)}") from error


def _numbers(connection: sqlite3.Connection) -> list[int]:
    rows = connection.execute("SELECT generation FROM generations ORDER BY generation")
    return [number for (number,) in rows]


def _read(connection: sqlite3.Connection, run: str, number: int) -> Generation:
    """Return a generation whose rows are as written and possible: [Note: Bounds]."""
    generation = read_generation(connection, run, number)
    shapes = chunk_shapes(generation.layout)
    check_generation(generation, shapes, len(read_directories(connection)))
    return generation


def check_heads(
    connection: sqlite3.Connection, path: Path, data_files: Sequence[Path], transaction: int
) -> int:
    """Return the last transaction that is in all heads; raise DamageError if one was lost.

    ``transaction``: the last one of the manifest.
    """
    run = read_meta(connection, "run")
    heads = [(file, read_head(file, run)) for file in data_files]
    difference = find_difference(heads, transaction)
    if difference is not None:
        raise damaged(path, f"{difference}; {describe_whole(connection)}")
    return min((head.transaction for _, head in heads), default=transaction)


def check_at_rest(path: Path, directories: Sequence[Path]) -> bool:
    """Check the manifest ``path`` and the data files in ``directories``; return whether it could.

    By a connection that only reads: when one that writes is closed, SQLite brings what it takes for
    whole of a log into the database and removes the log. It could not where that has to be done to
    read at all: with the journal of a killed run.
    """
    if with_suffix(path, "-journal").exists():
        return False
    try:
        with closing(connect_to_read(path)) as connection:
            if check_marks(connection, path):
                transaction = check_all(connection, path)
                # The rows that name the run and its directories have been checked by now.
                check_files(read_meta(connection, "run"), directories)
                if len(read_directories(connection)) != len(directories):
                    raise damaged(path, "it lists other data files than there are")
                check_heads(connection, path, data_paths(directories), transaction)
                check_header(path)
    except sqlite3.Error as error:
        raise read_failure(path, error) from error
    return True


def check_header(path: Path) -> None:
    """Raise DamageError for a database that SQLite would read, and write to no more."""
    with regular_stream(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
        versions = file.read(20)[18:]
    if versions not in {b"", b"\1\1", b"\2\2"}:  # empty; with a rollback journal; with a log
        raise damaged(path, f"its header has the versions {versions.hex()}")


def load(connection: sqlite3.Connection, path: Path, run: str, number: int) -> Generation:
    """Return a generation; raise DamageError if its rows are not whole."""
    try:
        return _read(connection, run, number)
    except (StowError, *MALFORMED) as error:
        raise damaged(path, f"{error}; {describe_whole(connection)}") from error


def whole_generations(connection: sqlite3.Connection, run: str) -> list[Generation]:
    """Return the generations of ``run`` whose rows are whole, oldest first."""
    whole: list[Generation] = []
    try:
        check_schema(connection)
        numbers = _numbers(connection)
    except (StowError, *MALFORMED):
        return whole
    for number in numbers:
        with suppress(StowError, *MALFORMED):
            whole.append(_read(connection, run, number))
    return without_overlaps(whole)


def describe(generation: Generation) -> str:
    """Return a generation's number, step and names, for messages."""
    names = "".join(f", {name!r}" for name in generation.names)
    return f"generation {generation.number} (step {generation.step}{names})"


def describe_whole(connection: sqlite3.Connection) -> str:
    """Return which generations are whole, for messages."""
    try:
        whole = whole_generations(connection, read_meta(connection, "run"))
    except MALFORMED:
        whole = []
    if not whole:
        return "no generation in it is whole"
    return f"whole are {', '.join(map(describe, whole))}"
