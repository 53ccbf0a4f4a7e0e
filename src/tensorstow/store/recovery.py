"""Rebuilds a damaged manifest from what is intact of it and of its copy, when asked to.

All bytes that the new manifest refers to are read first. The old one is kept next to it. Of the
data files only the heads are written; what the new manifest does not refer to is free from then on.
"""

import errno as codes
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from tensorstow.base.directories import inspect_directory
from tensorstow.base.errors import StoreFormatError, StowError, named
from tensorstow.base.regular_file import is_there, regular_stream
from tensorstow.store.bounds import check_schema, without_overlaps
from tensorstow.store.datafiles import (
    Head,
    check_files,
    data_path,
    data_paths,
    find_head,
    put_head,
    read_label,
)
from tensorstow.store.durability import SystemDisk
from tensorstow.store.inspect import open_for_reading
from tensorstow.store.lock import DirectoryLock
from tensorstow.store.manifest import Journal, Manifest
from tensorstow.store.manifest_copy import (
    COPY_NAME,
    DAMAGED_NAME,
    copy_database,
    find_copy_damage,
    replace_manifest,
)
from tensorstow.store.records import Generation
from tensorstow.store.rows import check_seal, read_names, read_summaries
from tensorstow.store.schema import (
    MANIFEST_NAME,
    MOST_BYTES,
    check_journal,
    check_marks,
    connect,
    read_meta,
    with_suffix,
)
from tensorstow.store.scrub import ScrubProgress, scrub
from tensorstow.store.verify import MALFORMED, check_all, check_heads, whole_generations

_BESIDE = ("-wal", "-journal")


@dataclass(frozen=True, slots=True)
class Recovery:
    """The intact part of a store, all of which was read."""

    run: str
    directories: tuple[Path, ...]
    whole: tuple[Generation, ...]
    """Oldest first: records and bytes."""
    damaged: tuple[Generation, ...]
    """Those with whole records and other bytes: damaged, or written over since."""
    newest: Head
    """The newest transaction that a data file records, or a manifest if none is readable."""
    lost: tuple[str, ...]
    """What was reported or has a name, and is not whole; or may be, if nothing tells."""
    damage: str | None
    """What is wrong; None if nothing is."""
    is_copy_only: bool
    """Whether only the manifest's copy is damaged."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The contents of a manifest or its copy."""

    whole: tuple[Generation, ...]
    names: Mapping[str, int]
    """Snapshots and their generations: all of them if there is a ``head``."""
    damage: str | None
    head: Head
    """What it ends with; transaction 0 unless its seal is right."""


@contextmanager
def hold_recovery(
    directories: Sequence[Path], report: Callable[[ScrubProgress], object] = lambda _: None
) -> Iterator[Recovery]:
    """Lock the store in ``directories``, read all of it and return what is intact.

    Name all directories, in their order. ``report`` is called with the progress of reading. Raises
    StoreFormatError if there is no store, one of another format, or one with more directories;
    LockedError if its run is live.
    """
    first, *rest = (inspect_directory(directory).path for directory in directories)
    with named("A recovery of the store in", first), ExitStack() as resources:
        label = read_label(data_path(first, 0)) if is_there(data_path(first, 0)) else None
        if label is None:
            message = (
                f"A store was requested in {first}: there is no states-0.bin in it that says which"
                " run it is of. Name the store's first directory."
            )
            raise StoreFormatError(message)
        resources.callback(DirectoryLock(first).release)
        if label.count > 1 and not rest:
            message = (
                f"A recovery was requested of the store in {first}, which has {label.count}"
                " directories: only directories that are named are changed. Name all of them, in"
                " their order (`tensorstow run inspect` prints them)."
            )
            raise StoreFormatError(message)
        paths = [first, *rest]
        check_files(label.run, paths)
        # The files there are of this run by now, so no lock is made in somebody else's directory.
        for path in paths[1:]:
            resources.callback(DirectoryLock(path).release)
        yield _find(label.run, paths, report)


def _find(run: str, paths: Sequence[Path], report: Callable[[ScrubProgress], object]) -> Recovery:
    data_files = data_paths(paths)
    rows = _choose_rows(paths[0], run, data_files)
    copy_damage = find_copy_damage(paths[0] / MANIFEST_NAME) if rows.damage is None else None
    damage, whole = rows.damage, rows.whole
    bad: set[int] = set()
    with open_for_reading(data_files) as files:
        for progress in scrub(files, whole):
            report(progress)
            for flawed in progress.damages:
                damage = damage or str(flawed)
                bad.update(flawed.generations)
    good = [generation for generation in whole if generation.number not in bad]
    heads = [head for file in data_files if (head := find_head(file, run)) is not None]
    newest = max(heads, key=lambda head: head.transaction, default=rows.head)
    is_known = bool(heads) or rows.head.transaction > 0
    # A manifest that is older than a data file's head may lack names that were given since.
    is_listed = is_known and rows.head.transaction >= newest.transaction
    lost = list(_lost(newest, rows.names, good)) if damage is not None else []
    if not is_known:
        lost.append(
            "what was reported is unknown: no data file's record of it and no manifest's list of"
            " commits is readable"
        )
    if not is_listed:
        good = _with_names(good, rows.names)
        lost.append(
            "names of snapshots are unknown: no manifest has the last list of them; each commit"
            " that is whole is kept under a name"
        )
    return Recovery(
        run=run,
        directories=tuple(paths),
        whole=tuple(good),
        damaged=tuple(generation for generation in whole if generation.number in bad),
        newest=newest,
        lost=tuple(lost),
        damage=damage or copy_damage,
        is_copy_only=damage is None and copy_damage is not None,
    )


def _choose_rows(first: Path, run: str, data_files: Sequence[Path]) -> _Rows:
    """Return the manifest's rows if it is whole, else the whole rows of it and of its copy."""
    try:
        copy = _read_rows(first, COPY_NAME, run, data_files)
    except StoreFormatError as error:
        copy = _Rows((), {}, str(error), Head(run))
    try:
        rows = _read_rows(first, MANIFEST_NAME, run, data_files)
    except StoreFormatError as error:
        if copy.damage is not None:
            raise  # intact but unreadable for us: what it refers to must not be overwritten
        return replace(copy, damage=str(error))
    if rows.damage is None:
        return rows
    # Of two rows of one number `_united` takes those of the first.
    better, other = (copy, rows) if copy.damage is None else (rows, copy)
    # The later list of names counts; if neither seal is right, all names do.
    listed = max(better, other, key=lambda each: each.head.transaction)
    names = listed.names if listed.head.transaction else {**other.names, **better.names}
    whole = [
        replace(
            generation, names=tuple(n for n, g in sorted(names.items()) if g == generation.number)
        )
        for generation in _united(better.whole, other.whole)
    ]
    return _Rows(tuple(whole), names, rows.damage, listed.head)


def _with_names(whole: Sequence[Generation], taken: Mapping[str, int]) -> list[Generation]:
    """Name generations that have no name: the next commit would free what an unknown one pinned."""
    named_ones: list[Generation] = []
    for generation in whole:
        name = f"recovered-{generation.number}"
        while name in taken:
            name += "+"
        named_ones.append(generation if generation.names else replace(generation, names=(name,)))
    return named_ones


def _united(*manifests: Sequence[Generation]) -> list[Generation]:
    """Return the generations of several manifests, oldest first; of one number, the first."""
    by_number: dict[int, Generation] = {}
    for generation in (generation for whole in manifests for generation in whole):
        by_number.setdefault(generation.number, generation)
    return without_overlaps([by_number[number] for number in sorted(by_number)])


def _lost(newest: Head, names: Mapping[str, int], whole: Sequence[Generation]) -> Iterator[str]:
    numbers = {generation.number for generation in whole}
    if newest.generation and max(numbers, default=0) < newest.generation:
        yield (f"generation {newest.generation} (step {newest.step}), the newest that was reported")
    for name, number in names.items():
        if number not in numbers:
            yield f"snapshot {name!r} (generation {number})"


def recover(recovery: Recovery) -> None:
    """Write a manifest of the intact generations; call it while ``recovery`` is held."""
    first, disk = recovery.directories[0], SystemDisk()
    if recovery.is_copy_only:
        with named("A recovery of the store in", first):
            copy_database(first / MANIFEST_NAME, first / COPY_NAME, disk)
            disk.sync_directory(first)
        return
    with (
        named("A recovery of the store in", first),
        tempfile.TemporaryDirectory(dir=first) as scratch,
    ):
        new = Path(scratch) / MANIFEST_NAME
        numbers = [
            recovery.newest.generation,
            *(generation.number for generation in recovery.whole),
        ]
        # Without a log the new manifest is one file, which a rename puts in place.
        with closing(Manifest(new, disk, Journal.ROLLBACK)) as manifest:
            manifest.begin_run(recovery.run, recovery.directories)
            # Far from any used number, so that older copies can be told apart.
            manifest.put_back(recovery.whole, recovery.newest.transaction + 1000, max(numbers))
            head = manifest.head()
        disk.sync_directory(new.parent)
        replace_manifest(first / MANIFEST_NAME, new, disk)
        for path in data_paths(recovery.directories):
            put_head(path, head)
        copy_database(first / MANIFEST_NAME, first / COPY_NAME, disk)
        disk.sync_directory(first)


def _read_rows(first: Path, name: str, run: str, data_files: Sequence[Path]) -> _Rows:
    """Return what is whole of the manifest ``name``, from a copy, as SQLite writes to its log."""
    check_journal(first / name)
    with tempfile.TemporaryDirectory(dir=first) as scratch:
        copy = _copy_manifest(first, name, Path(scratch))
        with closing(connect(copy)) as connection:
            whole = whole_generations(connection, run)
            try:
                check_schema(connection)
                names = dict(read_names(connection, run))
            except (StowError, *MALFORMED):
                names = {}
            head = _sealed_head(connection, run)
            damage = _find_damage(connection, first / name, data_files)
    return _Rows(tuple(whole), names, damage, head)


def _sealed_head(connection: sqlite3.Connection, run: str) -> Head:
    """Return what a manifest ends with if its lists are those that were written."""
    with suppress(StowError, *MALFORMED):
        check_schema(connection)
        check_seal(connection)
        if read_meta(connection, "run") == run:
            transaction = int(read_meta(connection, "transaction"))
            newest = read_summaries(connection)[-1:]
            return Head(
                run, transaction, *((newest[0].number, int(newest[0].step)) if newest else ())
            )
    return Head(run)


def _copy_manifest(first: Path, name: str, scratch: Path) -> Path:
    """Copy a manifest, or an earlier recovery's backup, with its log."""
    copy = scratch / name
    for suffix in ("", *_BESIDE):
        # A backup is of use only while there is no manifest.
        backup = name == MANIFEST_NAME and not is_there(first / name)
        candidates = (f"{name}{suffix}", *((f"{DAMAGED_NAME}{suffix}",) if backup else ()))
        source = next((first / name for name in candidates if is_there(first / name)), None)
        if source is not None:
            flags = os.O_RDONLY | os.O_NOFOLLOW
            with (
                regular_stream(source, flags, most=MOST_BYTES) as old,
                with_suffix(copy, suffix).open("xb") as new,
            ):
                _copy_data(old, new)
    return copy


def _copy_data(old: BinaryIO, new: BinaryIO) -> None:
    """Copy a file without its holes: a sparse one has more bytes than the disk."""
    size = os.fstat(old.fileno()).st_size
    start = end = 0
    while end < size:
        try:
            start = os.lseek(old.fileno(), end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != codes.ENXIO:
                raise
            break  # only a hole is left
        end = os.lseek(old.fileno(), start, os.SEEK_HOLE)
        for at in range(start, end, 1 << 20):
            data = os.pread(old.fileno(), min(1 << 20, end - at), at)
            os.pwrite(new.fileno(), data, at)
    new.truncate(size)


def _find_damage(
    connection: sqlite3.Connection, path: Path, data_files: Sequence[Path]
) -> str | None:
    try:
        if not check_marks(connection, path):
            return f"{path} is empty or gone"
        check_heads(connection, path, data_files, check_all(connection, path))
    except StoreFormatError:
        raise  # another version's: no damage, and nothing to write over
    except (StowError, *MALFORMED) as error:
        return str(error)
    return None
