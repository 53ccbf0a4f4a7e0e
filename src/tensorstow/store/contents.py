"""The store of a run that is over, open for reading."""

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tensorstow.base.directories import inspect_directory
from tensorstow.base.errors import LockedError, named
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File, open_file
from tensorstow.store.datafiles import check_files
from tensorstow.store.inspect import data_files, read_only
from tensorstow.store.manifest_copy import find_copy_damage
from tensorstow.store.pins import pin
from tensorstow.store.records import Generation
from tensorstow.store.rows import read_summaries
from tensorstow.store.schema import MANIFEST_NAME, read_meta
from tensorstow.store.verify import load


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
