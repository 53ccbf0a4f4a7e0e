"""`tensorstow scrub`: read everything that a run's directory holds, and print what is damaged."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from tensorstow.base.errors import LockedError
from tensorstow.base.sizes import format_bytes
from tensorstow.cli.output import (
    by_rank,
    make_console,
    print_json,
    print_line,
)
from tensorstow.io.engine import open_engine
from tensorstow.store.inspect import inspect_store
from tensorstow.store.rank_dirs import stores_in
from tensorstow.store.scrub import Damage, scrub
from tensorstow.store.store import Store

DAMAGED = 1


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading one store."""

    directory: Path
    read_bytes: int
    damages: tuple[Damage, ...]

    def __str__(self) -> str:
        """Return one line for people."""
        outcome = f"{len(self.damages):,} damaged" if self.damages else "all as written"
        return f"{self.directory}: {format_bytes(self.read_bytes)} read back: {outcome}"


def run(given: argparse.Namespace) -> int:
    """Run the command; return its exit status: 1 if something is damaged."""
    directories = stores_in(given.directory)
    console = make_console(to_stderr=given.json)  # of progress, and of what people read
    found = []
    for directory in directories:
        with _held(directory) as store:
            reading = _read_back(store, _chosen(store, given.generation), given, console)
        found.append(reading)
        if not given.json:
            print_line(console, str(reading))
    if given.json:
        print_json(by_rank([asdict(each) for each in found], directories, given.directory))
    return DAMAGED if any(each.damages for each in found) else 0


@contextmanager
def _held(directory: Path) -> Iterator[Store]:
    found = inspect_store(directory)  # a store that is not there is not to be made
    if found.holder is not None:
        message = (
            f"A scrub of {found.directory} was requested but the store is held by {found.holder}:"
            " wait until that is over. (A run checks what it reads by itself.)"
        )
        raise LockedError(message)
    with Store.open([file.path.parent for file in found.files], open_engine()) as store:
        yield store


def _chosen(store: Store, wanted: str | None) -> list[int] | None:
    if wanted is None:
        return None
    generation = store.generation(int(wanted) if wanted.isdigit() else wanted)
    return [generation.number] if generation is not None else []


def _read_back(
    store: Store, numbers: list[int] | None, given: argparse.Namespace, console: Console
) -> Reading:
    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    done = 0
    damages: list[Damage] = []
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("scrub")
        for progress in scrub(store, numbers):
            done = progress.done_bytes
            bar.update(task, total=progress.total_bytes, completed=done)
            damages += progress.found
            for damage in () if given.json else progress.found:
                print_line(console, str(damage))
    return Reading(store.directories[0], done, tuple(damages))
