"""Bounds on what a manifest says, checked before anything uses it.

[Note: Bounds] A digest says that rows are those that somebody wrote, not who: whoever alters a row
can compute it anew. So each value that becomes an offset, a length, a dtype, a time or a path is
checked as well, whatever the digests say: its type, its range, and that what is stored twice is
equal. `checkpoint.stored_layout` checks the rest, which only the model's parameters can tell.
"""

import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter

from tensorstow.base.errors import DamageError
from tensorstow.store.records import (
    HEADER_BYTES,
    PAGE,
    ChunkRecord,
    ChunkShape,
    Extent,
    Generation,
    TensorRecord,
    chunk_shapes,
    padded,
)
from tensorstow.store.retention import is_name
from tensorstow.store.rows import read_names
from tensorstow.store.schema import TABLES, read_meta
from tensorstow.store.tensors import plain_bytes

MOST_BYTES = 1 << 56
"""More than a file can have."""
MOST_STEPS = 1 << 53
_LATEST = 1 << 40
"""A time, in seconds since 1970."""
_CHECKSUM_BYTES = 4
_MOST_TRANSACTIONS = 10**18 - 1
"""As many digits as a head has."""
_LONGEST_MARK = 200
_MOST_DIMENSIONS = 64


def check_schema(connection: sqlite3.Connection) -> None:
    """Raise DamageError unless the manifest has our tables, and nothing else.

    A view or a trigger would run what its author wrote when a row is read.
    """
    if _schema_of(connection) != _own_schema():
        message = "its tables are not those that this program makes"
        raise DamageError(message)


def _schema_of(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    rows = connection.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_master")
    # SQLite keeps the text of a statement as it was given, white space included.
    return {(kind, name, " ".join(sql.split())) for kind, name, sql in rows}


@lru_cache(maxsize=1)
def _own_schema() -> set[tuple[str, str, str]]:
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(TABLES)
        return _schema_of(connection)
    finally:
        connection.close()


def check_shared_rows(connection: sqlite3.Connection, run: str) -> int:
    """Return the number of the last transaction; raise DamageError for rows that cannot be.

    Of those that no single generation owns: the run, snapshots, the highest number ever used.
    """
    for key in ("run", "writer"):
        value = read_meta(connection, key)
        is_mark = value.isascii() and value.isprintable() and len(value) <= _LONGEST_MARK
        check(value, key, "the manifest", is_possible=is_mark)
    transaction = int(read_meta(connection, "transaction"))
    check_whole(transaction, "the last transaction", "the manifest", 1, _MOST_TRANSACTIONS)
    numbers = {n for (n,) in connection.execute("SELECT generation FROM generations")}
    names = connection.execute("SELECT name, generation FROM snapshots ORDER BY name").fetchall()
    if names != read_names(connection, run) or not {n for _, n in names} <= numbers:
        message = "the snapshots are not those that were written"
        raise DamageError(message)
    for table in ("chunks", "tensors"):
        (strays,) = connection.execute(
            f"SELECT count(*) FROM {table}"  # noqa: S608
            " WHERE generation NOT IN (SELECT generation FROM generations)"
        ).fetchone()
        check(strays, f"rows of {table}", "no generation", is_possible=strays == 0)
    last = connection.execute("SELECT seq FROM sqlite_sequence").fetchall()
    for (number,) in last if numbers else ():
        check_whole(number, "the highest number", "generations", max(numbers), MOST_BYTES)
    if len(last) > 1 or (numbers and not last):
        message = "the highest number of a generation is not what was written"
        raise DamageError(message)
    return transaction


def check_generation(generation: Generation, shapes: Sequence[ChunkShape], files: int) -> None:
    """Raise DamageError unless a writer of ours can have written ``generation``.

    ``shapes`` are of the chunks of its layout; ``files`` is the number of the store's data files.
    """
    whose = f"generation {generation.number!r}"
    check_whole(generation.number, "the number", whose, 1, MOST_BYTES)
    check_whole(generation.step, "the step", whose, 0, MOST_STEPS)
    created = generation.created
    is_time = type(created) is float and 0.0 <= created < _LATEST
    check(created, "the time", whose, is_possible=is_time)
    for name in generation.names:
        check(name, "a snapshot's name", whose, is_possible=is_name(name))
    for chunk in generation.chunks:
        _check_chunk(chunk, f"chunk {chunk.chunk!r} of {whose}", shapes, files)
    for tensor in generation.tensors:
        _check_tensor(tensor, f"tensor {tensor.name!r} of {whose}", files)


def check_disjoint(generations: Iterable[Generation]) -> None:
    """Raise DamageError if bytes belong to two extents: a chunk's and a tensor's, or two chunks'.

    Generations share whole extents, and one generation uses each of them once.
    """
    seen: set[Extent] = set()
    for generation in generations:
        extents = generation.extents()
        if len(set(extents)) < len(extents):
            message = f"two records of generation {generation.number} are at one place"
            raise DamageError(message)
        seen.update(extents)
    # In the order of offsets: if any two overlap, two neighbours do.
    for one, other in pairwise(sorted(seen, key=attrgetter("file", "offset", "nbytes"))):
        if one.file == other.file and other.offset < one.end:
            message = f"{one} and {other} have bytes in common"
            raise DamageError(message)


def without_overlaps(generations: Sequence[Generation]) -> list[Generation]:
    """Return generations, oldest first; of two that have bytes in common, the newer one alone."""
    try:
        check_disjoint(generations)
    except DamageError:
        pass
    else:
        return list(generations)  # compared once, as almost always
    disjoint: list[Generation] = []
    for generation in reversed(generations):
        try:
            check_disjoint([generation, *disjoint])
        except DamageError:
            continue
        disjoint.insert(0, generation)
    return disjoint


def check_inside(generation: Generation, sizes: Sequence[int]) -> None:
    """Raise DamageError if ``generation`` has bytes beyond the end of a data file."""
    for extent, nbytes in outside(generation, sizes):
        message = (
            f"Generation {generation.number} (step {generation.step}) has {nbytes} bytes at"
            f" offset {extent.offset} of states-{extent.file}.bin, which ends at"
            f" {sizes[extent.file]}: the file was cut short, or the manifest is another's."
            " Resume another generation (`tensorstow run inspect` prints them), or put the file"
            " back from a copy."
        )
        raise DamageError(message)


def outside(generation: Generation, sizes: Sequence[int]) -> Iterator[tuple[Extent, int]]:
    """Yield the extents that end after their data file does, and the bytes needed of each."""
    shapes = chunk_shapes(generation.layout)
    ends = [
        (chunk.extent, shape.weight_offset + shape.weight.span(shape.elements))
        for chunk in generation.chunks
        for shape in (shapes[chunk.chunk],)
    ]
    ends += [(tensor.extent, plain_bytes(tensor)) for tensor in generation.tensors]
    for extent, nbytes in ends:  # without padding, which nobody may have written
        if nbytes and extent.offset + nbytes > sizes[extent.file]:
            yield extent, nbytes


def _check_chunk(record: ChunkRecord, whose: str, shapes: Sequence[ChunkShape], files: int) -> None:
    check_whole(record.chunk, "the number", whose, 0, len(shapes) - 1)
    shape = shapes[record.chunk]
    _check_extent(record.extent, whose, files)
    is_room = record.extent.nbytes >= shape.nbytes
    check(record.extent, "the extent", whose, is_possible=is_room)
    nbytes = _CHECKSUM_BYTES * shape.blocks
    # A blank chunk has no states, so no checksums of them either: none, or zeros.
    of_states = 0 if record.blank and not record.checksums else nbytes
    _check_length(record.checksums, "the checksums of states", whose, of_states)
    is_possible = not (record.blank and any(record.checksums))
    check(record.checksums, "the checksums of states", whose, is_possible=is_possible)
    of_weights = nbytes if shape.weight.bytes else 0
    _check_length(record.weight_checksums, "the checksums of weights", whose, of_weights)


def _check_tensor(record: TensorRecord, whose: str, files: int) -> None:
    is_text = type(record.kind) is str and type(record.name) is str
    check((record.kind, record.name), "the name", whose, is_possible=is_text)
    is_shape = len(record.shape) <= _MOST_DIMENSIONS
    check(len(record.shape), "the dimensions", whose, is_possible=is_shape)
    for count in record.shape:
        check_whole(count, "the shape", whose, 0, MOST_BYTES)
    # Of no elements too: torch multiplies the others.
    is_size = math.prod(max(1, count) for count in record.shape) <= MOST_BYTES
    check(record.shape, "the shape", whose, is_possible=is_size)
    _check_extent(record.extent, whose, files)
    is_room = record.extent.nbytes == padded(plain_bytes(record))
    check(record.extent, "the extent", whose, is_possible=is_room)
    check_whole(record.checksum, "the checksum", whose, 0, (1 << 32) - 1)


def _check_extent(extent: Extent, whose: str, files: int) -> None:
    if extent == Extent(0, 0, 0):
        return
    check_whole(extent.file, "the file", whose, 0, files - 1)
    check_whole(extent.offset, "the offset", whose, HEADER_BYTES, MOST_BYTES)
    check_whole(extent.nbytes, "the length", whose, 1, MOST_BYTES)
    is_aligned = extent.offset % PAGE == 0 and extent.nbytes % PAGE == 0
    check(extent, "the extent", whose, is_possible=is_aligned)


def _check_length(value: object, field: str, whose: str, nbytes: int) -> None:
    if type(value) is not bytes:
        check(value, field, whose, is_possible=False)
    else:
        check(len(value), field, whose, is_possible=len(value) == nbytes)


def check_whole(value: object, field: str, whose: str, least: int, most: int) -> None:
    """Raise DamageError unless ``value`` is a whole number within bounds."""
    check(value, field, whose, is_possible=type(value) is int and least <= value <= most)


def check(value: object, field: str, whose: str, *, is_possible: bool) -> None:
    """Raise DamageError for ``field`` of ``whose``, unless ``is_possible``."""
    if not is_possible:
        raise impossible(value, field, whose)


def impossible(value: object, field: str, whose: str) -> DamageError:
    """Return the error for a value that no writer of ours leaves."""
    return DamageError(f"{field} of {whose} cannot be {repr(value)[:80]}")
