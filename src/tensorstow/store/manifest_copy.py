"""A second copy of the manifest, in a file of its own: one damaged byte ends no run.

[Note: Two manifests] SQLite's pages have no second copy, so a flipped bit in the manifest, or a
write of it that the drive has lost, took the only generation of a run with it. After each
transaction, while the heads are written, its rows go to the copy, and both are read back from the
drive. Nothing is reported, and no extent of the generation before is written over, until then. If
the manifest is damaged, opening the store puts the copy in its place.

The copy lacks one transaction if the process dies in between. Opening the store makes it anew if
it is not equal.
"""

import logging
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from tensorstow.base.errors import StowError
from tensorstow.base.regular_file import is_there
from tensorstow.store.durability import SystemDisk
from tensorstow.store.schema import (
    MANIFEST_NAME,
    SUFFIXES,
    Database,
    check_marks,
    connect,
    connect_to_read,
    read_meta,
    set_journal,
    with_suffix,
)
from tensorstow.store.verify import check_all, check_at_rest, check_header

logger = logging.getLogger("tensorstow")

COPY_NAME = "manifest-copy.sqlite"
_SMALL = ("meta", "files", "snapshots", "sqlite_sequence")
_IMMUTABLE = (
    (("chunks", "tensors", "generations"), "generation", "digest"),
    (("layouts",), "layout", "hash"),
)
"""Tables whose rows never change, a row's number, and what in the last of them tells it from
another one of that number."""
DAMAGED_NAME = f"{MANIFEST_NAME}.damaged"


class ManifestCopy(Database):
    """The copy of one manifest, which the caller has checked and has open."""

    def __init__(self, path: Path, disk: SystemDisk, journal: tuple[str, str]) -> None:
        """Open the copy of the manifest ``path``, and make it equal; make it anew if it is damaged.

        ``journal``: the modes of SQLite's journal and of its syncs. Raises sqlite3.Error,
        OSError.
        """
        self.path = path.with_name(COPY_NAME)
        self._disk = disk
        is_whole, is_equal = _compare(self.path, path)
        if not is_whole:
            copy_database(path, self.path, disk)
            disk.sync_directory(path.parent)
        super().__init__(self.path)
        try:
            set_journal(self.connection, journal)
            self.connection.execute("ATTACH ? AS source", (str(path),))
            if not is_equal:
                self.update()
        except BaseException:
            self.close()
            raise

    def update(self) -> None:
        """Make it equal to the manifest, durably; raise sqlite3.Error if it cannot be written."""
        with self.transaction(self._disk) as connection:
            for table in _SMALL:
                connection.execute(f"DELETE FROM main.{table}")  # noqa: S608
                connection.execute(f"INSERT INTO main.{table} SELECT * FROM source.{table}")  # noqa: S608
            for tables, number, content in _IMMUTABLE:
                gone = self._difference("main", "source", tables[-1], f"{number}, {content}")
                new = self._difference("source", "main", tables[-1], f"{number}, {content}")
                for name in tables:
                    condition = f"WHERE {number} = ?"
                    # First: a new row may have the number of one that is gone.
                    connection.executemany(f"DELETE FROM main.{name} {condition}", gone)  # noqa: S608
                    insert = f"INSERT INTO main.{name} SELECT * FROM source.{name} {condition}"  # noqa: S608
                    connection.executemany(insert, new)

    def _difference(self, of: str, than: str, table: str, columns: str) -> list[tuple[int]]:
        """Return the numbers of the rows that the database ``of`` has and ``than`` has not."""
        rows = self.connection.execute(
            f"SELECT {columns} FROM {of}.{table} EXCEPT SELECT {columns} FROM {than}.{table}"  # noqa: S608
        )
        return [(number,) for number, _ in rows]


def put_copy_in_place(path: Path, directories: Sequence[Path], disk: SystemDisk) -> bool:
    """Replace a damaged manifest by its copy; return whether that has all that was reported."""
    copy = path.with_name(COPY_NAME)
    try:
        if not copy.is_file() or not copy.stat().st_size or not check_at_rest(copy, directories):
            return False
    except StowError:
        return False
    # In the same directory, so that the rename stays on one filesystem.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        new = Path(scratch) / MANIFEST_NAME
        copy_database(copy, new, disk)
        replace_manifest(path, new, disk)
    return True


def replace_manifest(path: Path, new: Path, disk: SystemDisk) -> None:
    """Give ``new`` the name of the manifest, and put that aside."""
    # The old one goes before its log, and that before the new one comes: SQLite would put the log
    # of one into the other.
    for suffix in ("", "-wal", "-journal"):
        old = with_suffix(path, suffix)
        if old.exists():
            old.replace(with_suffix(path.with_name(DAMAGED_NAME), suffix))
    with_suffix(path, "-shm").unlink(missing_ok=True)
    new.replace(path)
    disk.sync_directory(path.parent)


def _compare(copy: Path, path: Path) -> tuple[bool, bool]:
    """Return whether the copy is whole, and whether it has the rows of the manifest.

    Logs that it is damaged.
    """
    # New manifests and those of older versions have no copy; a journal is left by a killed run.
    if not copy.is_file() or not copy.stat().st_size or with_suffix(copy, "-journal").exists():
        return False, False
    try:
        with closing(connect_to_read(copy)) as ours, closing(connect_to_read(path)) as theirs:
            if _check_copy(ours, copy):
                # A copy of another run is made anew. The seal is a digest over all rows.
                is_same_run, is_equal = (
                    read_meta(ours, key) == read_meta(theirs, key) for key in ("run", "seal")
                )
                return is_same_run, is_equal
    except (StowError, sqlite3.Error) as error:
        logger.warning("%s, the second copy of the manifest, is made anew: %s", copy, error)
    return False, False


def find_copy_damage(path: Path) -> str | None:
    """Return what is wrong with the copy of the manifest ``path``; None if nothing is.

    Call it when the run is over; nothing is written. Nothing is wrong if there is no copy, or if a
    killed process left it in the middle of a write: opening the store makes it anew.
    """
    copy = path.with_name(COPY_NAME)
    if not is_there(copy) or with_suffix(copy, "-journal").exists():
        return None
    try:
        with closing(connect_to_read(copy, is_still=True)) as connection:
            _check_copy(connection, copy)
    except (StowError, sqlite3.Error) as error:
        return f"{copy}, the second copy of the manifest, is damaged: {error}"
    return None


def _check_copy(connection: sqlite3.Connection, copy: Path) -> bool:
    """Return whether a copy has tables; raise StowError if they are not as written."""
    if not check_marks(connection, copy):
        return False
    check_all(connection, copy)
    check_header(copy)
    return True


def copy_database(path: Path, target: Path, disk: SystemDisk) -> None:
    """Copy a database with its log to a file, durably, in place of an existing one."""
    for suffix in SUFFIXES:
        with_suffix(target, suffix).unlink(missing_ok=True)
    # SQLite would create the file by the umask, and through a link.
    disk.create(target, b"")
    with closing(connect_to_read(path)) as source, closing(connect(target)) as copy:
        source.backup(copy)
