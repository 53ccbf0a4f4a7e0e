"""What a store holds, read without taking its lock; and its files, open for reading."""

import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from tensorstow.base.directories import inspect_directory
from tensorstow.base.errors import LockedError, StoreFormatError, named
from tensorstow.base.regular_file import is_there
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File, open_file
from tensorstow.store.datafiles import Label, check_files, is_file_of, labelled
from tensorstow.store.lock import peek
from tensorstow.store.manifest_copy import find_copy_damage
from tensorstow.store.records import HEADER_BYTES, Generation, Summary, chunk_shapes
from tensorstow.store.retention import pin
from tensorstow.store.rows import read_directories, read_extents, read_summaries
from tensorstow.store.schema import (
    MANIFEST_NAME,
    check_marks,
    connect_to_read,
    read_failure,
    read_format,
    read_meta,
)
from tensorstow.store.verify import check_all, check_heads, load


@dataclass(frozen=True, slots=True)
class DataFileInfo:
    """One data file."""

    path: Path
    bytes: int | None
    """Its size; None if it does not exist, or is not this run's."""
    used_bytes: int
    """The bytes that generations refer to."""

    @property
    def free_bytes(self) -> int | None:
        """The rest: free, or written by a live run and not committed yet."""
        return None if self.bytes is None else max(0, self.bytes - HEADER_BYTES - self.used_bytes)


@dataclass(frozen=True, slots=True)
class LayoutInfo:
    """The layout of the newest generation."""

    elements: int
    """The elements of all chunks."""
    chunks: int
    shapes: tuple[str, ...]
    """Each kind of chunk: bytes of states and of weight per element."""
    notes: dict[str, Any]
    """Short entries of the writer's layout, other than its chunks."""


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """The contents of a store, read without its lock."""

    directory: Path
    run: str
    writer: str
    format: int
    holder: str | None
    """The process that uses it now."""
    generations: tuple[Summary, ...]
    files: tuple[DataFileInfo, ...]
    layout: LayoutInfo | None
    """None if nothing is committed."""


def inspect_store(directory: Path) -> StoreInfo:
    """Inspect the store in ``directory``, also of a live run, without writes or locks.

    Raises StoreFormatError if there is none.
    """
    path = inspect_directory(directory).path
    with named("The store in", path), read_only(path) as (connection, holder):
        summaries = read_summaries(connection)
        used: Counter[int] = Counter()
        # A set, because generations share extents.
        for extent in {extent for listed in read_extents(connection).values() for extent in listed}:
            used[extent.file] += extent.nbytes
        run = read_meta(connection, "run")
        newest = load(connection, path, run, summaries[-1].number) if summaries else None
        return StoreInfo(
            directory=path,
            run=run,
            writer=read_meta(connection, "writer"),
            format=read_format(connection),
            holder=holder,
            generations=tuple(summaries),
            files=tuple(
                DataFileInfo(
                    name,
                    name.stat().st_size if is_file_of(label, name) else None,
                    used[label.index],
                )
                for label, name in data_files(connection, path).items()
            ),
            layout=_look_at(newest.layout) if newest else None,
        )


def is_finished(directory: Path) -> bool:
    """Return whether the store in ``directory`` was made to its end, and may have commits."""
    path = directory / MANIFEST_NAME
    try:
        with peek(directory) as holder, _connect(path, holder) as connection:
            return check_marks(connection, path)
    except sqlite3.Error as error:
        raise read_failure(path, error) from error


def data_files(connection: sqlite3.Connection, first: Path) -> dict[Label, Path]:
    """Return the data files that a manifest lists, which was found in ``first``.

    The run's first directory may have been moved since it noted them.
    """
    directories = read_directories(connection)[1:]
    return labelled(read_meta(connection, "run"), [first, *directories])


@contextmanager
def read_only(directory: Path) -> Iterator[tuple[sqlite3.Connection, str | None]]:
    """Open a manifest for reading; yield it with the holder of the store, if any."""
    path = directory / MANIFEST_NAME
    with peek(directory) as holder:
        if not is_there(path):
            message = f"A store was requested in {directory}: there is no {MANIFEST_NAME} in it."
            raise StoreFormatError(message)
        try:
            with _connect(path, holder) as connection:
                if not check_marks(connection, path):
                    message = (
                        f"A store was requested in {directory}: it was never finished, and nothing"
                        " is in it. A run may start there; or remove it by hand."
                    )
                    raise StoreFormatError(message)
                transaction = check_all(connection, path)
                if holder is None:  # else a commit may be between its transaction and its head
                    files = data_files(connection, directory)
                    ours = [file for label, file in files.items() if is_file_of(label, file)]
                    check_heads(connection, path, ours, transaction)
                yield connection, holder
        except sqlite3.Error as error:
            raise read_failure(path, error) from error


@contextmanager
def _connect(path: Path, holder: str | None) -> Iterator[sqlite3.Connection]:
    with named("The manifest", path):
        connection = connect_to_read(path, is_still=holder is None)  # `peek` keeps others out
    try:
        connection.execute("BEGIN")  # one state of it, though a run may be committing
        yield connection
    finally:
        connection.close()


def _look_at(layout: dict[str, Any]) -> LayoutInfo:
    shapes = chunk_shapes(layout)
    kinds = dict.fromkeys((shape.streams, shape.weight) for shape in shapes)
    return LayoutInfo(
        elements=sum(shape.elements for shape in shapes),
        chunks=len(shapes),
        shapes=tuple(
            " + ".join(f"{float(Fraction(s.bytes, s.per)):g}" for s in streams)
            + f" bytes of states, {float(Fraction(weight.bytes, weight.per)):g} of weight"
            for streams, weight in kinds
        ),
        notes={k: v for k, v in layout.items() if isinstance(v, str | int | float)},
    )


@dataclass(frozen=True, slots=True)
class StoreContents:
    """A store whose run is over, open for reading."""

    directory: Path
    files: tuple[File, ...]
    generations: tuple[Generation, ...]
    """Oldest first."""
    copy_damage: str | None
    """What is wrong with the manifest's copy; None if nothing is."""


@contextmanager
def open_contents(directory: Path, asked: str) -> Iterator[StoreContents]:
    """Open the store in ``directory`` for reading; no run can open it meanwhile.

    ``asked``: the request, for errors ("A scrub").

    Nothing is written, and no lock is made. The manifest lists the other directories, and a file in
    one is read if it is of this run. Raises LockedError if the run is live.
    """
    with _manifest(directory, asked) as (first, connection):
        run = read_meta(connection, "run")
        paths = list(data_files(connection, first).values())
        check_files(run, [path.parent for path in paths])
        generations = _generations(first, connection)
        with open_for_reading(paths) as files:
            copy_damage = find_copy_damage(first / MANIFEST_NAME)
            yield StoreContents(first, files, generations, copy_damage)


def read_generations(directory: Path, asked: str, *, live: bool = False) -> tuple[Generation, ...]:
    """Return the generations of the store in ``directory``, oldest first, by its manifest alone.

    Data files may be missing. ``asked``: the request, for errors. Raises LockedError if the run is
    live, unless it may be.
    """
    with _manifest(directory, asked, live=live) as (first, connection):
        return _generations(first, connection)


@contextmanager
def open_pinned(
    directory: Path, asked: str, number: int
) -> Iterator[tuple[tuple[File, ...], Generation] | None]:
    """Open one generation for reading, which the run may be live to add others to.

    The run keeps it until the end of the block ([Note: Pins]). Yields the data files and the
    generation; None if the run has dropped it.
    """
    with _manifest(directory, asked, live=True) as (first, connection):
        run = read_meta(connection, "run")
        paths = list(data_files(connection, first).values())
    check_files(run, [path.parent for path in paths])
    with open_for_reading(paths) as files:
        pinned = None
        # The manifest is read after the pin: [Note: Pins].
        if pin(files[0], number):
            check_files(run, [path.parent for path in paths])  # what is open is this run's
            generations = read_generations(directory, asked, live=True)
            pinned = next((g for g in generations if g.number == number), None)
        yield None if pinned is None else (files, pinned)


@contextmanager
def _manifest(
    directory: Path, asked: str, *, live: bool = False
) -> Iterator[tuple[Path, sqlite3.Connection]]:
    first = inspect_directory(directory).path
    with named("The store in", first), read_only(first) as (connection, holder):
        if holder is not None and not live:
            message = (
                f"{asked} of {first} was requested but the store is held by {holder}: wait until"
                " that is over."
            )
            raise LockedError(message)
        yield first, connection


def _generations(first: Path, connection: sqlite3.Connection) -> tuple[Generation, ...]:
    run = read_meta(connection, "run")
    numbers = [summary.number for summary in read_summaries(connection)]
    return tuple(load(connection, first / MANIFEST_NAME, run, number) for number in numbers)


@contextmanager
def open_for_reading(paths: Iterable[Path]) -> Iterator[tuple[File, ...]]:
    """Open data files, which exist, for reading."""
    engine = open_engine()
    with ExitStack() as opened:
        yield tuple(
            opened.enter_context(open_file(engine, path, access=os.O_RDONLY)) for path in paths
        )
