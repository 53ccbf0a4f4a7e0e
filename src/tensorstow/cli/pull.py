"""`tensorstow run pull`: copy a snapshot back from a bucket or another folder."""

import argparse
from dataclasses import asdict

from tensorstow.base.directories import make_directories
from tensorstow.base.errors import OptionError
from tensorstow.cli.output import print_by_rank
from tensorstow.cli.push import describe
from tensorstow.io.engine import open_engine
from tensorstow.store.rank_dirs import rank_directory, refuse_other_worlds
from tensorstow.store.remote import Remote
from tensorstow.store.remote_snapshots import find_snapshot, newest_snapshot, pull
from tensorstow.store.store import Store


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    remote = Remote(options.url)
    snapshot = find_snapshot(remote, options.snapshot or newest_snapshot(remote))
    world = len(snapshot.ranks)
    ranks = range(world) if options.rank is None else [options.rank]
    if ranks[-1] >= world:
        message = f"--rank {options.rank} was given: the snapshot has ranks 0 to {world - 1}."
        raise OptionError(message)
    make_directories([options.directory])
    refuse_other_worlds(options.directory, world)
    directories = [rank_directory(options.directory, rank, world) for rank in ranks]
    results = []
    for rank, directory in zip(ranks, directories, strict=True):
        make_directories([directory])
        with Store.open([directory], open_engine()) as store:
            results.append(pull(remote, snapshot, rank, store))
    if options.json:
        print_by_rank([asdict(result) for result in results], directories, options.directory)
        return 0
    for result, directory in zip(results, directories, strict=True):
        print(f"{directory}: {describe(result)} from {remote.url}")
    return 0
