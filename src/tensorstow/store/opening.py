"""Opens or creates the parts of a store, in an order that survives a crash at any point."""

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tensorstow._native as _native
from tensorstow.base.directories import check_directory
from tensorstow.base.errors import OptionError, named
from tensorstow.io.files import File
from tensorstow.store.datafiles import (
    check_files,
    check_unused,
    create_files,
    data_path,
    open_files,
)
from tensorstow.store.durability import Disk
from tensorstow.store.heads import sync_heads
from tensorstow.store.links import Links
from tensorstow.store.lock import DirectoryLock
from tensorstow.store.manifest import MANIFEST_NAME, Manifest, choose_journal
from tensorstow.store.verify import check_at_rest


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an open store: data files, manifest, disk and links."""

    files: tuple[File, ...]
    manifest: Manifest
    disk: Disk
    links: Links
    """Of all files that are open."""
    resources: ExitStack
    """Closes all of it, the lock last."""


def open_parts(directories: Sequence[Path], engine: _native.Engine, disk: Disk) -> Parts:
    """Lock ``directories`` and open the store in them, or create it."""
    facts = [check_directory(directory) for directory in directories]
    paths = [fact.path for fact in facts]
    if not paths or len(set(paths)) < len(paths):
        message = f"A store was requested in {[str(d) for d in directories]}: name each once."
        raise OptionError(message)
    links = Links()
    with ExitStack() as resources, named("The store in", paths[0]):
        for path in paths:
            lock = DirectoryLock(path)
            resources.callback(lock.release)
            links.expect(lock.path, lock.opened())
        path = paths[0] / MANIFEST_NAME
        if not path.exists():
            check_unused(paths)  # before anything is made
            disk.create(path, b"")
        is_checked = check_at_rest(path, paths)
        manifest = Manifest(path, disk, choose_journal(facts[0]), is_checked=is_checked)
        resources.callback(manifest.close)
        files = _open_files(manifest, paths, engine, disk)
        for file in files:
            resources.callback(file.close)
            links.expect(file.path, os.fstat(file.fd))
        for path in manifest.files():
            links.expect(path, path.stat())
        links.check()
        return Parts(files, manifest, disk, links, resources.pop_all())


def _open_files(
    manifest: Manifest, paths: Sequence[Path], engine: _native.Engine, disk: Disk
) -> tuple[File, ...]:
    if not manifest.is_new:
        check_files(manifest.run, paths)
        known = manifest.check_heads([data_path(path, k) for k, path in enumerate(paths)])
        with _closed_unless_well(open_files(disk, engine, paths)) as files:
            # First, so that no head is ever two transactions behind.
            if known < manifest.transaction:
                sync_heads(disk, files, manifest.head())
            if manifest.note_directories(paths):
                sync_heads(disk, files, manifest.head())
        return files
    check_unused(paths)
    run = str(uuid.uuid4())
    create_files(disk, run, paths)
    with _closed_unless_well(open_files(disk, engine, paths)) as files:
        for file in files:
            disk.sync_file(file)
        for path in paths:
            disk.sync_directory(path)
        # Last: where there are tables, there are the files that they name.
        manifest.begin_run(run, paths)
        sync_heads(disk, files, manifest.head())
    return files


@contextmanager
def _closed_unless_well(files: tuple[File, ...]) -> Iterator[tuple[File, ...]]:
    try:
        yield files
    except BaseException:
        for file in files:
            file.close()
        raise
