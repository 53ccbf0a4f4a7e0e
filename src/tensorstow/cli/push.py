"""`tensorstow run push`: copy a commit to a bucket or another folder."""

import argparse
from dataclasses import asdict
from pathlib import Path

from tensorstow.base.directories import inspect_directory
from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import format_bytes
from tensorstow.checkpoint.agreement import exchanged
from tensorstow.checkpoint.worlds import World, read_worlds
from tensorstow.cli.output import print_by_rank
from tensorstow.store.contents import StoreContents, open_contents
from tensorstow.store.records import Generation
from tensorstow.store.remote import Remote
from tensorstow.store.remote_snapshots import Transferred, push
from tensorstow.store.retention import find


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    world = _chosen(options.directory, options.snapshot)
    remote = Remote(options.url)
    results = []
    for rank, path in sorted(world.paths.items()):
        with open_contents(path, "A push") as store:
            generation = _generation(world, store, options.snapshot)
            results.append(
                push(
                    remote,
                    store.files,
                    generation,
                    options.name or options.snapshot or _name_of(generation),
                    rank=rank,
                    world=world.size,
                    commit=exchanged(generation).id,
                )
            )
    directories = [path for _, path in sorted(world.paths.items())]
    if options.json:
        print_by_rank([asdict(result) for result in results], directories, options.directory)
        return 0
    for result, directory in zip(results, directories, strict=True):
        print(f"{directory}: {describe(result)} to {remote.url}")
    if not results[-1].is_complete:
        print("the snapshot is there when all ranks have been pushed")
    return 0


def describe(result: Transferred) -> str:
    """Return what was moved, for people."""
    moved, total = format_bytes(result.moved_bytes), format_bytes(result.total_bytes)
    return f"{result.snapshot}, step {result.step}: moved {moved} of {total}"


def _chosen(directory: Path, name: str | None) -> World:
    """Return the ranks whose commit is to be pushed: the newest that has it."""
    base = inspect_directory(directory).path
    worlds = [world for world in read_worlds(base, "A push") if _has(world, name)]
    if not worlds:
        what = "no commit of all ranks" if name is None else f"no snapshot {name!r}"
        message = (
            f"A push of {directory} was requested, and there is {what}. Where the ranks' stores are"
            " on several machines, name a snapshot, and push on each of them."
        )
        raise OptionError(message)
    return max(worlds, key=lambda world: world.era)


def _has(world: World, name: str | None) -> bool:
    """Return whether all ranks have a commit, or those that are here have one of this name."""
    if name is None:
        return bool(world.common)
    return all(any(g.called(name) for g in of_rank) for of_rank in world.listed)


def _generation(world: World, store: StoreContents, name: str | None) -> Generation:
    if name is not None:
        return find(store.generations, name)
    wanted = world.common[-1].id
    return next(g for g in store.generations if wanted == (exchanged(g).id or str(g.number)))


def _name_of(generation: Generation) -> str:
    return generation.names[0] if generation.names else f"step-{generation.step}"
