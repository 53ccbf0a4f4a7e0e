"""`tensorstow run scrub`: read everything of a run or its copies, and report damage."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from tensorstow.base.sizes import format_bytes
from tensorstow.cli.output import make_console, print_by_rank, print_json, print_line
from tensorstow.store.inspect import StoreContents, open_contents
from tensorstow.store.rank_dirs import stores_in
from tensorstow.store.remote import Remote, address_of
from tensorstow.store.remote_snapshots import unfinished_snapshots
from tensorstow.store.remote_upkeep import RemoteProgress, scrub_remote
from tensorstow.store.retention import find
from tensorstow.store.scrub import Damage, ScrubProgress, scrub

DAMAGED = 1


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading one store."""

    directory: Path
    read_bytes: int
    damages: tuple[Damage, ...]
    copy_damage: str | None
    """What is wrong with the manifest's copy; None if nothing is."""

    @property
    def damage_count(self) -> int:
        """How many things are not as written."""
        return len(self.damages) + (self.copy_damage is not None)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status: 1 if something is damaged."""
    if (remote := address_of(options.directory)) is not None:
        return _scrub_copies(remote, options)
    directories = stores_in(options.directory)
    console = make_console(to_stderr=options.json)  # JSON has standard output for itself
    readings = []
    for directory in directories:
        with open_contents(directory, "A scrub") as store:
            reading = _read_back(store, options, console)
        readings.append(reading)
        if not options.json:
            print_line(
                console, _outcome(reading.directory, reading.read_bytes, reading.damage_count)
            )
    if options.json:
        print_by_rank([asdict(reading) for reading in readings], directories, options.directory)
    return DAMAGED if any(reading.damage_count for reading in readings) else 0


def _scrub_copies(remote: Remote, options: argparse.Namespace) -> int:
    """Read back what snapshots elsewhere list; return the exit status."""
    console = make_console(to_stderr=options.json)
    done, damages = _read_all(scrub_remote(remote, options.generation), options, console)
    unfinished = unfinished_snapshots(remote)
    if options.json:
        facts = {"damages": [asdict(damage) for damage in damages], "unfinished": unfinished}
        print_json({"address": remote.url, "read_bytes": done, **facts})
    else:
        for name, lists in unfinished.items():
            print_line(console, f"{name} is not complete: it has {', '.join(lists)} alone")
        print_line(console, _outcome(remote.url, done, len(damages)))
    return DAMAGED if damages else 0


def _read_back(store: StoreContents, options: argparse.Namespace, console: Console) -> Reading:
    generations, wanted = store.generations, options.generation
    if wanted is not None:
        generations = (find(generations, int(wanted) if wanted.isdigit() else wanted),)
    done, damages = _read_all(scrub(store.files, generations), options, console)
    if store.copy_damage is not None and not options.json:
        print_line(console, store.copy_damage)
    return Reading(store.directory, done, tuple(damages), store.copy_damage)


def _read_all(
    reads: Iterable[ScrubProgress | RemoteProgress], options: argparse.Namespace, console: Console
) -> tuple[int, list[Any]]:
    """Return how many bytes were read, and the damages, after printing each."""
    done = 0
    damages: list[Any] = []
    with reading_bar(console) as show_progress:
        for progress in reads:
            show_progress(progress)
            done = progress.done_bytes
            damages += progress.damages
            for damage in () if options.json else progress.damages:
                print_line(console, str(damage))
    return done, damages


def _outcome(place: object, nbytes: int, damage_count: int) -> str:
    outcome = f"{damage_count:,} damaged" if damage_count else "all as written"
    return f"{place}: {format_bytes(nbytes)} read back: {outcome}"


@contextmanager
def reading_bar(console: Console) -> Iterator[Callable[[ScrubProgress | RemoteProgress], None]]:
    """Show a progress bar on a terminal; yield the function that updates it."""
    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("scrub")
        yield lambda progress: bar.update(
            task, total=progress.total_bytes, completed=progress.done_bytes
        )
