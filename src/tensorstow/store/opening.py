"""Opens or creates the parts of a store, in an order that survives a crash at any point."""

import logging
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tensorstow._native as _native
from tensorstow.base.directories import check_directory
from tensorstow.base.errors import OptionError, StoreError, StoreFormatError, UnlinkedError, named
from tensorstow.io.files import File
from tensorstow.store.datafiles import (
    check_files,
    check_unused,
    create_files,
    data_paths,
    sync_heads,
)
from tensorstow.store.durability import SystemDisk
from tensorstow.store.lock import DirectoryLock
from tensorstow.store.manifest import Manifest, choose_journal
from tensorstow.store.manifest_copy import COPY_NAME, DAMAGED_NAME, put_copy_in_place
from tensorstow.store.schema import MANIFEST_NAME, check_database
from tensorstow.store.verify import check_at_rest

logger = logging.getLogger("tensorstow")


class Links:
    """The files that a store has open, and the paths that must lead to them.

    A file that is deleted or moved while open still takes writes and syncs, but its data cannot be
    found later. This is detected by comparing the open file with the one at the path.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._wanted: dict[Path, os.stat_result] = {}

    def expect(self, path: Path, opened: os.stat_result) -> None:
        """Record that ``path`` leads to the open file ``opened``."""
        self._wanted[path] = opened

    def check(self) -> None:
        """Raise UnlinkedError unless every path leads to the file that is open."""
        for path, opened in self._wanted.items():
            difference = _moved(path, opened)
            if difference is not None:
                message = (
                    f"The run commits to {path}, and {difference}: the file that this process has"
                    " open was deleted or moved, and so was what is committed in it. Put it back"
                    " where it was; or go on in another directory with"
                    " optimizer.commit_to(directory), which writes all that a resume needs there."
                )
                raise UnlinkedError(message)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an open store: data files, manifest, disk and links."""

    files: tuple[File, ...]
    manifest: Manifest
    disk: SystemDisk
    links: Links
    """The links to all files that are open."""
    resources: ExitStack
    """Closes all of it, the lock last."""


def open_parts(directories: Sequence[Path], engine: _native.Engine, disk: SystemDisk) -> Parts:
    """Lock ``directories`` and open the store in them, or create it."""
    facts = [check_directory(directory) for directory in directories]
    paths = [fact.path for fact in facts]
    if not paths or len(set(paths)) < len(paths):
        message = f"A store was requested in {[str(d) for d in directories]}: name each once."
        raise OptionError(message)
    links = Links()
    with ExitStack() as resources, named("The store in", paths[0]):
        for path in paths:
            # The locks come first: no other process changes what is checked and opened below.
            lock = DirectoryLock(path)
            resources.callback(lock.release)
            # Whoever finds no lock makes a new one, so a lock whose file is gone excludes nobody.
            links.expect(lock.path, lock.opened())
        path = paths[0] / MANIFEST_NAME
        check_database(path)
        check_database(path.with_name(COPY_NAME))
        if not path.exists() or not path.stat().st_size:
            _begin(path, paths, disk)
        try:
            is_checked = check_at_rest(path, paths)
        except StoreError as error:  # a bit of its header may make it another format, too
            if not put_copy_in_place(path, paths, disk):
                raise
            logger.warning(
                "The manifest in %s was damaged and is %s now; its copy, which has all that was"
                " reported, is in its place. What was found: %s",
                paths[0],
                DAMAGED_NAME,
                error,
            )
            is_checked = True  # put_copy_in_place has checked the copy
        manifest = Manifest(path, disk, choose_journal(facts[0]), is_checked=is_checked)
        resources.callback(manifest.close)

        def open_files() -> tuple[File, ...]:
            files = (disk.open(engine, path) for path in data_paths(paths))
            return tuple(map(resources.enter_context, files))

        files = _ready_files(manifest, paths, open_files, disk)
        # After the transactions of opening, which the copy then has.
        manifest.second.keep()
        for file in files:
            links.expect(file.path, os.fstat(file.fd))
        for path in manifest.files():
            links.expect(path, path.stat())
        # A file that was replaced while it was opened is found now, and not by the first commit.
        links.check()
        return Parts(files, manifest, disk, links, resources.pop_all())


def _begin(path: Path, directories: Sequence[Path], disk: SystemDisk) -> None:
    """Make an empty manifest, before anything else is made; or put the copy of a lost one there."""
    if put_copy_in_place(path, directories, disk):
        logger.warning(
            "%s was gone; its copy, which has all that was reported, is in its place", path
        )
        return
    check_unused(directories)
    copy = path.with_name(COPY_NAME)
    if copy.exists() and copy.stat().st_size:
        message = (
            f"A store was requested in {path.parent}: there is {copy}, and no manifest that it is a"
            " copy of. It was not touched: name another directory."
        )
        raise StoreFormatError(message)
    disk.create(path, b"")


def _ready_files(
    manifest: Manifest,
    paths: Sequence[Path],
    open_files: Callable[[], tuple[File, ...]],
    disk: SystemDisk,
) -> tuple[File, ...]:
    """Return the open data files, which the manifest and their heads agree about."""
    if not manifest.is_new:
        check_files(manifest.run, paths)
        oldest = manifest.check_heads(data_paths(paths))
        files = open_files()
        # Before the next transaction, so that no head ever lacks two.
        if oldest < manifest.transaction:
            sync_heads(disk, files, manifest.head())
        if manifest.note_directories(paths):
            sync_heads(disk, files, manifest.head())
        return files
    # Again: a killed creation may leave a manifest without tables, and then `_begin` is not called.
    check_unused(paths)
    run = str(uuid.uuid4())
    create_files(disk, run, paths)
    files = open_files()
    for file in files:
        disk.sync_file(file)
    for path in paths:
        disk.sync_directory(path)
    # Last: a manifest with tables has the files that they name.
    manifest.begin_run(run, paths)
    sync_heads(disk, files, manifest.head())
    return files


def _moved(path: Path, opened: os.stat_result) -> str | None:
    try:
        facts = path.stat()
    except OSError as error:
        return f"it is not there any more ({error.strerror})"
    return None if os.path.samestat(facts, opened) else "another file is there now"
