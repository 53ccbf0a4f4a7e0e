"""`tensorstow run push`: copy a commit to a bucket or another folder."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tensorstow.base.directories import inspect_directory
from tensorstow.base.errors import LockedError, OptionError
from tensorstow.base.sizes import format_bytes
from tensorstow.checkpoint.agreement import RankGeneration, exchanged
from tensorstow.checkpoint.worlds import World, read_worlds
from tensorstow.cli.output import print_by_rank
from tensorstow.io.files import File
from tensorstow.store.inspect import open_pinned
from tensorstow.store.records import Generation
from tensorstow.store.remote import Remote
from tensorstow.store.remote_snapshots import Transferred, push
from tensorstow.store.upload_notes import remove_note

_ASKED = "A push"
_TRIES = 20


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    remote = Remote(options.url)
    results = []
    with ExitStack() as pins:
        world, pinned = _pinned(options.directory, options.snapshot, pins)
        _, first = pinned[min(pinned)]
        name = options.name or options.snapshot or _name_of(first)
        for rank, (files, generation) in sorted(pinned.items()):
            commit = exchanged(generation).id
            results.append(
                push(remote, files, generation, name, rank=rank, world=world.size, commit=commit)
            )
            if name in generation.names:
                remove_note(world.paths[rank], name, remote.url)
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


def _pinned(
    directory: Path, name: str | None, pins: ExitStack
) -> tuple[World, dict[int, tuple[tuple[File, ...], Generation]]]:
    """Return the commit to push of each rank; a live run keeps them until ``pins`` are closed."""
    base = inspect_directory(directory).path
    for _ in range(_TRIES):
        world = _chosen(base, name)
        pinned = {}
        with ExitStack() as attempt:
            for (rank, path), of_rank in zip(
                sorted(world.paths.items()), world.listed, strict=True
            ):
                number = _number(world, of_rank, name)
                store = attempt.enter_context(open_pinned(path, _ASKED, number))
                if store is None:  # the run has committed since
                    break
                pinned[rank] = store
            else:
                pins.enter_context(attempt.pop_all())
                return world, pinned
    message = (
        f"A push of {directory} was requested, and its run drops each commit before it can be kept."
        " Let it commit less often, or make a snapshot and push that."
    )
    raise LockedError(message)


def _chosen(base: Path, name: str | None) -> World:
    """Return the ranks whose commit is to be pushed: the newest that has it."""
    worlds = [world for world in read_worlds(base, _ASKED) if _has(world, name)]
    if not worlds:
        missing = "no commit of all ranks" if name is None else f"no snapshot {name!r}"
        message = (
            f"A push of {base} was requested, and there is {missing}. Where the ranks' stores are"
            " on several machines, name a snapshot, and push on each of them."
        )
        raise OptionError(message)
    return max(worlds, key=lambda world: world.era)


def _has(world: World, name: str | None) -> bool:
    """Return whether all ranks have a commit, or those that are here have one of this name."""
    if name is None:
        return bool(world.common)
    return all(any(g.called(name) for g in of_rank) for of_rank in world.listed)


def _number(world: World, of_rank: Sequence[RankGeneration], name: str | None) -> int:
    """Return the number that the commit to push has on one rank."""
    wanted = None if name is not None else world.common[-1].id
    return next(g.number for g in of_rank if (g.called(name) if name else g.id == wanted))


def _name_of(generation: Generation) -> str:
    return generation.names[0] if generation.names else f"step-{generation.step}"
