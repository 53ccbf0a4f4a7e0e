"""Records to rows of the manifest and back."""

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorstow.base.errors import OptionError
from tensorstow.store.records import (
    ChunkRecord,
    Content,
    Extent,
    Generation,
    Summary,
    TensorRecord,
)

_TABLES_OF_RECORDS = ("chunks", "tensors")


def read_directories(connection: sqlite3.Connection) -> list[Path]:
    """Return where the data files were when the store was last opened."""
    rows = connection.execute("SELECT directory FROM files ORDER BY file")
    return [Path(directory) for (directory,) in rows]


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


def read_generation(connection: sqlite3.Connection, summary: Summary) -> Generation:
    """Return all of the generation that ``summary`` is of."""
    layout, hyper, extra = connection.execute(
        "SELECT body, hyper, extra FROM generations JOIN layouts USING (layout)"
        " WHERE generation = ?",
        (summary.number,),
    ).fetchone()
    chunks = connection.execute(
        "SELECT chunk, file, offset, nbytes, blank, checksums, weight_checksums FROM chunks"
        " WHERE generation = ? ORDER BY chunk",
        (summary.number,),
    )
    tensors = connection.execute(
        "SELECT kind, name, dtype, shape, file, offset, nbytes, checksum FROM tensors"
        " WHERE generation = ? ORDER BY kind, name",
        (summary.number,),
    )
    return Generation(
        step=summary.step,
        layout=json.loads(layout),
        hyper=json.loads(hyper),
        extra=json.loads(extra),
        chunks=tuple(
            ChunkRecord(chunk, Extent(f, o, n), bool(blank), sums, weight_sums)
            for chunk, f, o, n, blank, sums, weight_sums in chunks
        ),
        tensors=tuple(
            TensorRecord(kind, name, dtype, tuple(json.loads(shape)), Extent(f, o, n), checksum)
            for kind, name, dtype, shape, f, o, n, checksum in tensors
        ),
        number=summary.number,
        created=summary.created,
        names=summary.names,
    )


def read_extents(connection: sqlite3.Connection) -> dict[int, list[Extent]]:
    """Return the extents of every kept generation by its number."""
    found: dict[int, list[Extent]] = {
        number: [] for (number,) in connection.execute("SELECT generation FROM generations")
    }
    for table in _TABLES_OF_RECORDS:
        rows = connection.execute(
            f"SELECT generation, file, offset, nbytes FROM {table} WHERE nbytes > 0"  # noqa: S608
        )
        for number, *place in rows:
            found[number].append(Extent(*place))
    return found


def insert_generation(connection: sqlite3.Connection, content: Content, created: float) -> int:
    """Add a generation made of ``content``; return its number."""
    nbytes = sum(extent.nbytes for extent in set(content.extents()))
    cursor = connection.execute(
        "INSERT INTO generations (step, created, layout, hyper, extra, chunks, bytes)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            content.step,
            created,
            _layout_number(connection, to_json(content.layout, "layout")),
            to_json(content.hyper, "hyper"),
            to_json(content.extra, "extra"),
            len(content.chunks),
            nbytes,
        ),
    )
    number = cursor.lastrowid or 0  # never None behind an INSERT
    connection.executemany(
        "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (number, r.chunk, *_place(r.extent), r.blank, r.checksums, r.weight_checksums)
            for r in content.chunks
        ),
    )
    connection.executemany(
        "INSERT INTO tensors VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (number, r.kind, r.name, r.dtype, json.dumps(r.shape), *_place(r.extent), r.checksum)
            for r in content.tensors
        ),
    )
    return number


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
    """Return ``value`` as text; raise OptionError where JSON cannot hold it."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        message = (
            f"A commit was asked for whose {name} cannot be kept: {error}. Give numbers, strings,"
            " lists and dicts; tensors have records of their own."
        )
        raise OptionError(message) from error


def _layout_number(connection: sqlite3.Connection, body: str) -> int:
    """Return the number of the layout ``body``; generations mostly share one."""
    digest = hashlib.sha256(body.encode()).hexdigest()
    select = "SELECT layout FROM layouts WHERE hash = ?"
    row: tuple[Any, ...] | None = connection.execute(select, (digest,)).fetchone()
    if row is None:
        insert = "INSERT INTO layouts (hash, body) VALUES (?, ?)"
        return connection.execute(insert, (digest, body)).lastrowid or 0
    return int(row[0])


def _place(extent: Extent) -> tuple[int, int, int]:
    return extent.file, extent.offset, extent.nbytes
