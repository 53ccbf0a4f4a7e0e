"""Checks that the manifest's rows are those that were written.

[Note: Digests] in `digests`. No row is used before it is checked.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from tensorstow.base.errors import DamageError
from tensorstow.store.datafiles import check_files, data_path
from tensorstow.store.digests import check_seal, seal_of
from tensorstow.store.heads import find_difference, read_head
from tensorstow.store.records import Generation
from tensorstow.store.rows import check_generation, read_generation, read_names
from tensorstow.store.schema import check_marks, damaged, read_failure, read_meta

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


def seal(connection: sqlite3.Connection, transaction: int) -> None:
    """End the transaction of this number with a seal over the rows that generations share."""
    insert = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
    connection.execute(insert, ("transaction", str(transaction)))
    connection.execute(insert, ("seal", seal_of(connection)))


def check_shared(connection: sqlite3.Connection, path: Path) -> None:
    """Raise DamageError unless the rows that generations share match their seal."""
    try:
        check_seal(connection)
    except (DamageError, *MALFORMED) as error:
        raise damaged(path, str(error)) from error


def check_all(connection: sqlite3.Connection, path: Path) -> int:
    """Return the number of the last transaction; raise DamageError unless all rows are whole."""
    try:
        _check_pages(connection)
        check_seal(connection)
        run = read_meta(connection, "run")
        for (number,) in connection.execute("SELECT generation FROM generations").fetchall():
            check_generation(connection, run, number)
        return int(read_meta(connection, "transaction"))
    except (DamageError, *MALFORMED) as error:
        found = str(error) if isinstance(error, DamageError) else repr(error)
        raise damaged(path, f"{found}; {describe_whole(connection)}") from error


def _check_pages(connection: sqlite3.Connection) -> None:
    (result,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if result != "ok":
        raise DamageError(str(result).replace("\n", " "))


def check_heads(
    connection: sqlite3.Connection, path: Path, data_files: Sequence[Path], transaction: int
) -> int:
    """Return the last transaction that is in all heads; raise DamageError where one was lost.

    ``transaction``: the last one of the manifest.
    """
    run = read_meta(connection, "run")
    heads = [(file, read_head(file, run)) for file in data_files]
    found = find_difference(heads, transaction)
    if found is not None:
        raise damaged(path, f"{found}; {describe_whole(connection)}")
    return min((head.transaction for _, head in heads), default=transaction)


def check_at_rest(path: Path, directories: Sequence[Path]) -> bool:
    """Check the manifest ``path`` and the data files in ``directories``; return whether it could.

    By a connection that only reads: when one that writes is closed, SQLite brings what it takes for
    whole of a log into the database and removes the log. It could not where that has to be done to
    read at all: with the journal of a killed run.
    """
    if path.with_name(f"{path.name}-journal").exists():
        return False
    try:
        uri = f"file:{quote(str(path))}?mode=ro"
        with closing(
            sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)
        ) as connection:
            if check_marks(connection, path):
                transaction = check_all(connection, path)
                check_files(read_meta(connection, "run"), directories)
                data_files = [data_path(directory, k) for k, directory in enumerate(directories)]
                check_heads(connection, path, data_files, transaction)
    except sqlite3.Error as error:
        raise read_failure(path, error) from error
    return True


def load(connection: sqlite3.Connection, path: Path, run: str, number: int) -> Generation:
    """Return a generation; raise DamageError where its rows are not whole."""
    try:
        return read_generation(connection, run, number)
    except (DamageError, *MALFORMED) as error:
        raise damaged(path, f"{error}; {describe_whole(connection)}") from error


def whole_generations(connection: sqlite3.Connection, run: str) -> tuple[list[Generation], bool]:
    """Return the generations of ``run`` that are whole, oldest first, and whether those are all."""
    whole: list[Generation] = []
    try:
        numbers = connection.execute("SELECT generation FROM generations").fetchall()
        named = {number for _, number in read_names(connection, run)}
    except MALFORMED:
        return whole, False
    for (number,) in numbers:
        try:
            whole.append(read_generation(connection, run, number))
        except (DamageError, *MALFORMED):
            continue
    found = {generation.number for generation in whole}
    complete = len(found) == len(numbers) and named <= found
    return sorted(whole, key=lambda generation: generation.number), complete


def describe(generation: Generation) -> str:
    """Return a generation's number, step and names, for messages."""
    names = "".join(f", {name!r}" for name in generation.names)
    return f"generation {generation.number} (step {generation.step}{names})"


def describe_whole(connection: sqlite3.Connection) -> str:
    """Return which generations are whole, for messages."""
    try:
        whole, _ = whole_generations(connection, read_meta(connection, "run"))
    except MALFORMED:
        whole = []
    if not whole:
        return "no generation in it is whole"
    return f"whole are {', '.join(map(describe, whole))}"
