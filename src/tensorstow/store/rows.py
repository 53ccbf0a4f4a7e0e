"""Records to rows of the manifest and back, with digests: SQLite does not check its pages.

[Note: Digests] Each generation has a digest over all its rows, computed from the inserted values
and checked against those that are read before they are used. The seal is a digest over all that
belongs to no single generation: the lists of generations, snapshots and files, the schema, the run.
Each transaction rewrites it.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tensorstow.base.errors import DamageError, OptionError
from tensorstow.store.records import ChunkRecord, Content, Extent, Generation, Summary, TensorRecord

SqlRow = Sequence[Any]
# Statements of several rows have an order, so that equal rows have one digest.
_SEALED = (
    "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name",
    "SELECT key, value FROM meta WHERE key <> 'seal' ORDER BY key",
    "SELECT file, directory FROM files ORDER BY file",
    "SELECT layout, hash FROM layouts ORDER BY layout",
    "SELECT generation, digest FROM generations ORDER BY generation",
    "SELECT name, generation, digest FROM snapshots ORDER BY name",
    "SELECT seq FROM sqlite_sequence WHERE name = 'generations'",
)
_TABLES_OF_RECORDS = ("chunks", "tensors")
# A lookup raises an error for other values, which bool() would take for True.
_FLAGS = {0: False, 1: True}


def digest_of(*tables: Iterable[SqlRow]) -> bytes:
    """Return the digest of rows of numbers, text, bytes and None, table by table."""
    total = hashlib.sha256()
    for rows in tables:
        table = list(rows)
        # Lengths: so that no byte may go from one value to the next.
        plain = [[(len(v),) if type(v) is bytes else v for v in row] for row in table]
        total.update(repr(plain).encode("utf-8", "surrogatepass"))
        total.update(b"".join([v for row in table for v in row if type(v) is bytes]))
    return total.digest()


def seal(connection: sqlite3.Connection, transaction: int) -> None:
    """End the transaction of this number with a seal over the rows that generations share."""
    insert = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
    connection.execute(insert, ("transaction", str(transaction)))
    connection.execute(insert, ("seal", seal_of(connection)))


def seal_of(connection: sqlite3.Connection) -> str:
    """Return the seal of the manifest as it is."""
    return digest_of(*(connection.execute(statement) for statement in _SEALED)).hex()


def check_seal(connection: sqlite3.Connection) -> None:
    """Raise DamageError unless the manifest has the seal that it should have."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'seal'").fetchone()
    if row is None or row[0] != seal_of(connection):
        message = "which generations, snapshots and files there are is not what was written"
        raise DamageError(message)


def read_directories(connection: sqlite3.Connection) -> list[Path]:
    """Return the paths of the data files when the store was last opened.

    Nobody vouches for them: whoever changes a file there checks that its user has named the
    directory, and that the file is of this run.
    """
    rows = connection.execute("SELECT file, directory FROM files ORDER BY file").fetchall()
    for number, (file, directory) in enumerate(rows):
        is_path = type(directory) is str and directory.startswith("/") and "\0" not in directory
        # Stores are opened by resolved paths. ".." would lead out of a directory that is named.
        if file != number or not is_path or ".." in Path(directory).parts:
            message = f"{repr(directory)[:80]} cannot be the directory of data file {file}"
            raise DamageError(message)
    return [Path(directory) for _, directory in rows]


def read_summaries(connection: sqlite3.Connection) -> list[Summary]:
    """Return all kept generations, oldest first."""
    names: dict[int, list[str]] = {}
    for name, number in connection.execute("SELECT name, generation FROM snapshots ORDER BY name"):
        names.setdefault(number, []).append(name)
    rows = connection.execute(
        "SELECT generation, step, created, chunks, bytes FROM generations ORDER BY generation"
    )
    return [
        Summary(number, step, created, tuple(names.get(number, ())), chunks, nbytes)
        for number, step, created, chunks, nbytes in rows
    ]


def read_generation(connection: sqlite3.Connection, run: str, number: int) -> Generation:
    """Return a generation of ``run``; raise DamageError if its rows were changed."""
    row, body, chunks, tensors = _read_checked(connection, run, number)
    step, created, hyper, extra, *counts = row
    generation = Generation(
        step=step,
        layout=json.loads(body),
        hyper=json.loads(hyper),
        extra=json.loads(extra),
        chunks=tuple(
            ChunkRecord(chunk, Extent(f, o, n), _FLAGS[blank], sums, weight_sums)
            for chunk, f, o, n, blank, sums, weight_sums in chunks
        ),
        tensors=tuple(
            TensorRecord(kind, name, dtype, tuple(json.loads(shape)), Extent(f, o, n), checksum)
            for kind, name, dtype, shape, f, o, n, checksum in tensors
        ),
        number=number,
        created=created,
        names=tuple(name for name, pinned in read_names(connection, run) if pinned == number),
    )
    # The counts are stored beside the records, for summaries: [Note: Bounds] in `bounds`.
    if tuple(counts) != _counts(generation):
        raise _damaged(number)
    return generation


def _read_checked(
    connection: sqlite3.Connection, run: str, number: int
) -> tuple[SqlRow, str, Sequence[SqlRow], Sequence[SqlRow]]:
    """Return a generation's row, layout, chunks and tensors, which have its digest."""
    stored = connection.execute(
        "SELECT step, created, hyper, extra, chunks, bytes, digest, hash, body"
        " FROM generations LEFT JOIN layouts USING (layout) WHERE generation = ?",
        (number,),
    ).fetchone()
    chunks = connection.execute(
        "SELECT chunk, file, offset, nbytes, blank, checksums, weight_checksums FROM chunks"
        " WHERE generation = ? ORDER BY chunk",
        (number,),
    ).fetchall()
    tensors = connection.execute(
        "SELECT kind, name, dtype, shape, file, offset, nbytes, checksum FROM tensors"
        " WHERE generation = ? ORDER BY kind, name",
        (number,),
    ).fetchall()
    if stored is None:
        raise _damaged(number)
    *row, digest, layout, body = stored
    # SQLite keeps a value of any type in a column of text.
    if type(body) is not str or layout != _hash(body):
        raise _damaged(number)
    if digest != _digest(run, number, row, body, chunks, tensors):
        raise _damaged(number)
    return row, body, chunks, tensors


def _digest(
    run: str,
    number: int,
    row: SqlRow,
    body: str,
    chunks: Iterable[SqlRow],
    tensors: Iterable[SqlRow],
) -> bytes:
    return digest_of([(run, number, *row, _hash(body))], chunks, tensors)


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _counts(content: Content) -> tuple[int, int]:
    """Return what a summary says of its size."""
    return len(content.chunks), sum(extent.nbytes for extent in set(content.extents()))


def _damaged(number: int) -> DamageError:
    return DamageError(f"the records of generation {number} are not those that were written")


def read_extents(connection: sqlite3.Connection) -> dict[int, list[Extent]]:
    """Return the extents of every kept generation by its number."""
    extents: dict[int, list[Extent]] = {
        number: [] for (number,) in connection.execute("SELECT generation FROM generations")
    }
    for table in _TABLES_OF_RECORDS:
        rows = connection.execute(
            f"SELECT generation, file, offset, nbytes FROM {table} WHERE nbytes > 0"  # noqa: S608
        )
        for number, *place in rows:
            extents[number].append(Extent(*place))
    return extents


def insert_generation(
    connection: sqlite3.Connection,
    run: str,
    content: Content,
    created: float,
    number: int | None = None,
) -> int:
    """Add a generation made of ``content``; return its number, by default the next one."""
    # The digest covers the number, so SQLite cannot assign it when the row is inserted.
    if number is None:
        number = last_number(connection) + 1
    body = to_json(content.layout, "layout")
    chunks = [
        (r.chunk, *_place(r.extent), int(r.blank), r.checksums, r.weight_checksums)
        for r in sorted(content.chunks, key=lambda r: r.chunk)
    ]
    tensors = [
        (r.kind, r.name, r.dtype, json.dumps(r.shape), *_place(r.extent), r.checksum)
        # By bytes, as SQLite orders text: the digest is over rows in the order of reading.
        for r in sorted(content.tensors, key=lambda r: (r.kind.encode(), r.name.encode()))
    ]
    row = (
        content.step,
        float(created),
        to_json(content.hyper, "hyper"),
        to_json(content.extra, "extra"),
        *_counts(content),
    )
    connection.execute(
        "INSERT INTO generations"
        " (generation, layout, step, created, hyper, extra, chunks, bytes, digest)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            number,
            _layout_number(connection, body),
            *row,
            _digest(run, number, row, body, chunks, tensors),
        ),
    )
    connection.executemany(
        "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)", ((number, *r) for r in chunks)
    )
    connection.executemany(
        "INSERT INTO tensors VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", ((number, *r) for r in tensors)
    )
    return number


def last_number(connection: sqlite3.Connection) -> int:
    """Return the highest number that a generation ever had."""
    row = connection.execute(
        "SELECT seq FROM sqlite_sequence WHERE name = 'generations'"
    ).fetchone()
    return int(row[0]) if row else 0


def note_last_number(connection: sqlite3.Connection, number: int) -> None:
    """Make the numbers of later generations larger than this one."""
    # The table has no key, so that INSERT OR REPLACE would add a second row.
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'generations'")
    connection.execute("INSERT INTO sqlite_sequence VALUES ('generations', ?)", (number,))


def read_names(connection: sqlite3.Connection, run: str) -> list[tuple[str, int]]:
    """Return the snapshots and their generations; leave out names that are not as written."""
    rows = connection.execute("SELECT name, generation, digest FROM snapshots ORDER BY name")
    # A digest of its own for each, so that a recovery keeps the names whose rows are intact.
    return [(n, g) for n, g, digest in rows if digest == digest_of([(run, n, g)])]


def insert_name(connection: sqlite3.Connection, run: str, name: str, number: int) -> None:
    """Add a snapshot."""
    row = (name, number, digest_of([(run, name, number)]))
    connection.execute("INSERT INTO snapshots VALUES (?, ?, ?)", row)


def delete_generations(connection: sqlite3.Connection, numbers: Sequence[int]) -> None:
    """Remove generations, and layouts that none is left of."""
    which = [(number,) for number in numbers]
    for table in (*_TABLES_OF_RECORDS, "generations"):
        connection.executemany(f"DELETE FROM {table} WHERE generation = ?", which)  # noqa: S608
    if which:
        connection.execute(
            "DELETE FROM layouts WHERE layout NOT IN (SELECT layout FROM generations)"
        )


def to_json(value: object, name: str) -> str:
    """Return ``value`` as text; raise OptionError if JSON cannot hold it."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        message = (
            f"A commit was requested whose {name} cannot be kept: {error}. Give numbers, strings,"
            " lists and dicts; tensors have records of their own."
        )
        raise OptionError(message) from error


def _layout_number(connection: sqlite3.Connection, body: str) -> int:
    """Return the number of the layout ``body``; generations mostly share one."""
    digest = _hash(body)
    select = "SELECT layout FROM layouts WHERE hash = ?"
    row: tuple[Any, ...] | None = connection.execute(select, (digest,)).fetchone()
    if row is None:
        insert = "INSERT INTO layouts (hash, body) VALUES (?, ?)"
        return connection.execute(insert, (digest, body)).lastrowid or 0
    return int(row[0])


def _place(extent: Extent) -> tuple[int, int, int]:
    return extent.file, extent.offset, extent.nbytes
