"""`tensorstow run clean`: remove the files of a dead run, or copies of one, and no others."""

import argparse
from contextlib import ExitStack
from dataclasses import asdict

from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.cli.output import print_by_rank, print_json
from tensorstow.store.rank_dirs import stores_in
from tensorstow.store.remote import Remote, address_of
from tensorstow.store.remote_upkeep import clean_remote, find_unlisted
from tensorstow.store.remove import Removal, hold_dead_run, remove


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    first, *other_directories = options.directories
    if (remote := address_of(first)) is not None:
        return _clean_copies(remote, options)
    if options.snapshot:
        message = (
            f"--snapshot was given, and {first} is a run's directory: optimizer.drop(name) removes"
            " a snapshot of it. Name an address, or leave --snapshot out."
        )
        raise OptionError(message)
    with ExitStack() as locks:  # all of them first: a run with one live rank is not dead
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


def _clean_copies(remote: Remote, options: argparse.Namespace) -> int:
    """Remove snapshots and unlisted objects of an address; return the exit status."""
    if len(options.directories) > 1:
        message = f"{remote.url} was named with other directories: clean one address at a time."
        raise OptionError(message)
    act = clean_remote if options.yes else find_unlisted
    removal = act(remote, options.snapshot)
    if options.json:
        print_json({"removed": options.yes, "address": remote.url, **asdict(removal)})
        return 0
    verb = "removed" if options.yes else "would remove"
    for path in (*removal.files, *removal.objects):
        print(f"{verb} {remote.url}/{path}")
    for path in removal.foreign:
        print(f"left alone, no object of a snapshot: {remote.url}/{path}")
    listed = format_count(len(removal.objects), "object")
    print(f"{verb} {listed}, {format_bytes(removal.nbytes)}; {removal.kept_objects:,} stay")
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
