"""Removes the files of a dead run's store, and nothing else."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tensorstow.base.directories import inspect_directory
from tensorstow.base.errors import LockedError, OptionError, named
from tensorstow.base.regular_file import remove_file
from tensorstow.store.datafiles import PATTERN, Label, is_file_of
from tensorstow.store.durability import SystemDisk
from tensorstow.store.inspect import data_files, read_only
from tensorstow.store.lock import LOCK_NAME, DirectoryLock
from tensorstow.store.manifest_copy import COPY_NAME
from tensorstow.store.records import Summary
from tensorstow.store.rows import read_directories, read_summaries
from tensorstow.store.schema import MANIFEST_NAME, SUFFIXES, read_meta, with_suffix
from tensorstow.store.upload_notes import is_note, note_files


@dataclass(frozen=True, slots=True)
class Removal:
    """The files to remove, in this order, and those that stay."""

    run: str
    generations: tuple[Summary, ...]
    """The generations that would be lost."""
    files: tuple[Path, ...]
    nbytes: int
    foreign: tuple[Path, ...]
    """Files in the same directories that are not this run's."""


@contextmanager
def hold_dead_run(directory: Path, other_directories: Sequence[Path] = ()) -> Iterator[Removal]:
    """Lock the store in ``directory`` and return what it consists of.

    Files in other directories that the manifest lists are part of it if those are among
    ``other_directories``, or in one of them: only what the user names is changed. Raises
    StoreFormatError if there is no store, LockedError if its run is live, OptionError if the store
    has further directories.
    """
    first, *rest = (inspect_directory(path).path for path in (directory, *other_directories))
    with named("The removal of the store in", first), _hold(first, rest) as removal:
        yield removal


@contextmanager
def _hold(first: Path, rest: Sequence[Path]) -> Iterator[Removal]:
    with read_only(first) as (connection, holder):
        if holder is not None:
            message = (
                f"The store in {first} was to be removed but is held by {holder}: a live run's is"
                " never touched. End that first."
            )
            raise LockedError(message)
        run, generations = read_meta(connection, "run"), read_summaries(connection)
        noted, paths = read_directories(connection), data_files(connection, first)
    unnamed = {
        label: path
        for label, path in paths.items()
        # Resolved, as the others are: a link in a directory that is named may lead out of it.
        if (parent := Path(os.path.realpath(path.parent))) != first
        and not any(parent.is_relative_to(other) for other in rest)
    }
    # A store that was moved or copied names the files of the original.
    if noted[0] == first and any(is_file_of(label, path) for label, path in unnamed.items()):
        listed = " ".join(str(path.parent) for path in paths.values())
        message = (
            f"The store in {first} was to be removed, and by its manifest it has files in"
            f" {', '.join(str(path.parent) for path in unnamed.values())}, which was not named."
            f" If they are its own, name all directories: tensorstow run clean {listed}"
        )
        raise OptionError(message)
    # A directory without a file of this run is not locked, and its lock is not removed.
    mine = {
        label: path
        for label, path in paths.items()
        if label not in unnamed and (path.parent == first or is_file_of(label, path))
    }
    with ExitStack() as locks:
        # After `read_only`, whose shared lock would keep this one out.
        for parent in dict.fromkeys(p.parent for p in mine.values() if p.parent.is_dir()):
            locks.callback(DirectoryLock(parent).release)
        yield _plan(run, generations, mine)


def remove(removal: Removal) -> None:
    """Remove the files; call it while the run is held."""
    for path in removal.files:
        remove_file(path)
    for parent in {path.parent for path in removal.files}:
        SystemDisk().sync_directory(parent)


def _plan(run: str, generations: list[Summary], paths: dict[Label, Path]) -> Removal:
    ours = [path for label, path in paths.items() if is_file_of(label, path)]
    manifest = next(iter(paths.values())).with_name(MANIFEST_NAME)
    databases = (manifest.with_name(COPY_NAME), manifest)  # last: it lists what is left
    ours += [with_suffix(path, end) for path in databases for end in reversed(SUFFIXES)]
    ours += [path for path in note_files(manifest.parent) if is_note(path)]
    parents = dict.fromkeys(p.parent for p in paths.values() if p.parent.is_dir())
    # Last, and not if another store may be there: a run that waits for it sees it go.
    ours += [parent / LOCK_NAME for parent in parents if not _has_another(parent, ours)]
    ours = [path for path in ours if path.exists()]
    return Removal(
        run=run,
        generations=tuple(generations),
        files=tuple(ours),
        # Files may have holes: what becomes free is the blocks that are allocated.
        nbytes=sum(path.stat().st_blocks * 512 for path in ours),
        foreign=tuple(p for parent in parents for p in sorted(parent.iterdir()) if p not in ours),
    )


def _has_another(parent: Path, ours: list[Path]) -> bool:
    return any(path not in ours for path in (*parent.glob(PATTERN), *parent.glob(MANIFEST_NAME)))
