"""Removes the files of a dead run's store, and nothing else."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tensorstow.base.directories import inspect_directory
from tensorstow.base.errors import LockedError, named
from tensorstow.store.datafiles import PATTERN, Label, read_label
from tensorstow.store.durability import SystemDisk
from tensorstow.store.inspect import data_paths, read_only
from tensorstow.store.lock import LOCK_NAME, DirectoryLock
from tensorstow.store.manifest import MANIFEST_NAME
from tensorstow.store.records import Summary
from tensorstow.store.rows import read_directories, read_summaries
from tensorstow.store.schema import read_meta

_COMPANIONS = ("-wal", "-shm", "-journal", "")  # the manifest last: it lists what is left


@dataclass(frozen=True, slots=True)
class Removal:
    """The files to remove, in this order, and those that stay."""

    run: str
    generations: tuple[Summary, ...]
    """What would be lost."""
    files: tuple[Path, ...]
    nbytes: int
    foreign: tuple[Path, ...]
    """In the same directories, and not this run's."""


@contextmanager
def hold_dead_run(directory: Path) -> Iterator[Removal]:
    """Lock the store in ``directory`` and return what it consists of.

    Raises StoreFormatError where there is no store, LockedError where its run is live.
    """
    first = inspect_directory(directory).path
    with named("The removal of the store in", first), _hold(first) as removal:
        yield removal


@contextmanager
def _hold(first: Path) -> Iterator[Removal]:
    with read_only(first) as (connection, holder):
        if holder is not None:
            message = (
                f"The store in {first} was to be removed but is held by {holder}: a live run's is"
                " never touched. End that first."
            )
            raise LockedError(message)
        run, generations = read_meta(connection, "run"), read_summaries(connection)
        paths = data_paths(read_directories(connection), first)
    with ExitStack() as locks:
        for parent in dict.fromkeys(path.parent for path in paths if path.parent.is_dir()):
            locks.callback(DirectoryLock(parent).release)
        yield _plan(run, generations, paths)


def remove(removal: Removal) -> None:
    """Remove the files; call it while the run is held."""
    for path in removal.files:
        path.unlink(missing_ok=True)
    for parent in {path.parent for path in removal.files}:
        SystemDisk().sync_directory(parent)


def _plan(run: str, generations: list[Summary], paths: list[Path]) -> Removal:
    ours = [
        path
        for index, path in enumerate(paths)
        if path.is_file() and read_label(path) == Label(run, index, len(paths))
    ]
    manifest = paths[0].with_name(MANIFEST_NAME)
    ours += [manifest.with_name(manifest.name + suffix) for suffix in _COMPANIONS]
    parents = dict.fromkeys(path.parent for path in paths if path.parent.is_dir())
    # Last of all, and not where another store may live: a run that waits for it sees it go.
    ours += [parent / LOCK_NAME for parent in parents if not _has_another(parent, ours)]
    ours = [path for path in ours if path.exists()]
    return Removal(
        run=run,
        generations=tuple(generations),
        files=tuple(ours),
        nbytes=sum(path.stat().st_blocks * 512 for path in ours),
        foreign=tuple(p for parent in parents for p in sorted(parent.iterdir()) if p not in ours),
    )


def _has_another(parent: Path, ours: list[Path]) -> bool:
    return any(path not in ours for path in (*parent.glob(PATTERN), *parent.glob(MANIFEST_NAME)))
