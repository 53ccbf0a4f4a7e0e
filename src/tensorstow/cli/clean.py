"""`tensorstow run clean`: remove the files of a dead run, and no others."""

import argparse
from contextlib import ExitStack
from dataclasses import asdict

from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.cli.output import print_by_rank
from tensorstow.store.rank_dirs import stores_in
from tensorstow.store.remove import Removal, hold_dead_run, remove


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    with ExitStack() as locks:  # all of them first: a run with one live rank is not dead
        first, *other_directories = options.directories
        directories = stores_in(first)
        removals = [locks.enter_context(hold_dead_run(d, other_directories)) for d in directories]
        for removal in removals if options.yes else ():
            remove(removal)
    if options.json:
        facts = [{"removed": options.yes, **asdict(removal)} for removal in removals]
        print_by_rank(facts, directories, first)
        return 0
    for removal in removals:
        print(*_lines(removal, "removed" if options.yes else "would remove"), sep="\n")
    if not options.yes:
        print("nothing was touched: add --yes to remove it")
    return 0


def _lines(removal: Removal, verb: str) -> list[str]:
    steps = [
        f"{s.step} ({', '.join(s.names)})" if s.names else str(s.step) for s in removal.generations
    ]
    return [
        f"run {removal.run}: committed steps {', '.join(steps) or 'none'}",
        *(f"{verb} {path}" for path in removal.files),
        f"{verb} {format_count(len(removal.files), 'file')}, {format_bytes(removal.nbytes)}",
        *(f"left alone, not this run's: {path}" for path in removal.foreign),
    ]
