"""`tensorstow clean`: remove a dead run's store, and nothing that is not its own."""

import argparse
from contextlib import ExitStack
from pathlib import Path

from tensorstow.base.sizes import format_bytes
from tensorstow.store.by_rank import stores_in
from tensorstow.store.cleaning import Cleaning, hold_dead_run, remove


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the store's first directory")
    parser.add_argument("--yes", action="store_true", help="remove it; without this, only say what")


def run(given: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    with ExitStack() as locks:  # all of them first: a run of which one rank lives is not dead
        found = [locks.enter_context(hold_dead_run(d)) for d in stores_in(given.directory)]
        for cleaning in found if given.yes else ():
            remove(cleaning)
    for cleaning in found:
        for line in _lines(cleaning, "removed" if given.yes else "would remove"):
            print(line)
    if not given.yes:
        print("nothing was touched: add --yes to remove it")
    return 0


def _lines(cleaning: Cleaning, verb: str) -> list[str]:
    kept = [
        f"{s.step} ({', '.join(s.names)})" if s.names else str(s.step) for s in cleaning.generations
    ]
    return [
        f"run {cleaning.run}: committed steps {', '.join(kept) or 'none'}",
        *(f"{verb} {path}" for path in cleaning.files),
        f"{verb} {format_bytes(cleaning.nbytes)} in all",
        *(f"left alone, not this run's: {path}" for path in cleaning.foreign),
    ]
