"""`tensorstow scrub`: read back everything that a store keeps, and say what is damaged."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from tensorstow.base.errors import LockedError
from tensorstow.base.sizes import format_bytes
from tensorstow.io.engine import open_engine
from tensorstow.store.by_rank import stores_in
from tensorstow.store.scrub import scrub
from tensorstow.store.store import Store
from tensorstow.store.survey import survey

DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the store's first directory")
    parser.add_argument(
        "--generation",
        metavar="NAME",
        help="read this one only: a snapshot's name or a number (default: all that are kept)",
    )


def run(given: argparse.Namespace) -> int:
    """Run the command; return its exit status: 1 where something is damaged."""
    found = stores_in(given.directory)
    return max([_scrub(directory, given.generation) for directory in found])


def _scrub(directory: Path, generation: str | None) -> int:
    found = survey(directory)  # a store that is not there is not to be made
    if found.holder is not None:
        message = (
            f"A scrub of {found.directory} was asked for but the store is held by {found.holder}:"
            " wait until that is over. (A run checks what it reads by itself.)"
        )
        raise LockedError(message)
    with Store.open([file.path.parent for file in found.files], open_engine()) as store:
        return _report(store, _chosen(store, generation))


def _chosen(store: Store, wanted: str | None) -> list[int] | None:
    if wanted is None:
        return None
    generation = store.generation(int(wanted) if wanted.isdigit() else wanted)
    return [generation.number] if generation is not None else []


def _report(store: Store, numbers: list[int] | None) -> int:
    console = Console()
    done, damages = 0, 0
    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stdout.isatty()
    ) as bar:
        task = bar.add_task("scrub")
        for progress in scrub(store, numbers):
            done = progress.done_bytes
            bar.update(task, total=progress.total_bytes, completed=done)
            for damage in progress.found:
                damages += 1
                console.print(str(damage), highlight=False, markup=False, soft_wrap=True)
    verdict = f"{damages} damaged" if damages else "all as written"
    place = store.directories[0]
    said = f"{place}: {format_bytes(done)} read back: {verdict}"
    console.print(said, highlight=False, markup=False, soft_wrap=True)
    return DAMAGED if damages else 0
