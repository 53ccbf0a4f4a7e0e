"""The manifest's tables, and what SQLite's errors mean."""

import ctypes
import errno as codes
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from tensorstow.base.errors import (
    CommitError,
    DamageError,
    OptionError,
    StoreError,
    StoreFormatError,
    SyncError,
    advice_for,
)
from tensorstow.base.regular_file import check_regular, regular_stream
from tensorstow.store import at_fork
from tensorstow.store.durability import SystemDisk

MANIFEST_NAME = "manifest.sqlite"
SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Suffixes of a database and of the files that SQLite makes next to it."""
MOST_BYTES = 16 << 30
"""No manifest is larger: it has 4 bytes of checksums for each block of each kept generation."""
FORMAT = 2
"""Counts up with every change that an older reader would misread."""
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
APPLICATION = 0x73746F77  # "stow": distinguishes a manifest from other SQLite files

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE files (file INTEGER PRIMARY KEY, directory TEXT NOT NULL);
CREATE TABLE layouts (layout INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE, body TEXT NOT NULL);
CREATE TABLE generations (
    generation INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER NOT NULL, created REAL NOT NULL,
    layout INTEGER NOT NULL REFERENCES layouts, hyper TEXT NOT NULL, extra TEXT NOT NULL,
    chunks INTEGER NOT NULL, bytes INTEGER NOT NULL, digest BLOB NOT NULL
);
CREATE TABLE chunks (
    generation INTEGER NOT NULL REFERENCES generations, chunk INTEGER NOT NULL,
    file INTEGER NOT NULL, offset INTEGER NOT NULL, nbytes INTEGER NOT NULL,
    blank INTEGER NOT NULL, checksums BLOB NOT NULL, weight_checksums BLOB NOT NULL,
    PRIMARY KEY (generation, chunk)
) WITHOUT ROWID;
CREATE TABLE tensors (
    generation INTEGER NOT NULL REFERENCES generations, kind TEXT NOT NULL, name TEXT NOT NULL,
    dtype TEXT NOT NULL, shape TEXT NOT NULL,
    file INTEGER NOT NULL, offset INTEGER NOT NULL, nbytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (generation, kind, name)
) WITHOUT ROWID;
CREATE TABLE snapshots (
    name TEXT PRIMARY KEY, generation INTEGER NOT NULL REFERENCES generations,
    digest BLOB NOT NULL
) WITHOUT ROWID;
"""


def with_suffix(path: Path, suffix: str) -> Path:
    """Return the path of a file that SQLite makes next to the database ``path``."""
    return path.with_name(f"{path.name}{suffix}")


def check_database(path: Path) -> None:
    """Raise DirectoryError unless a database and the files next to it are plausible files.

    Files that do not exist are. The database is not opened: closing it would end SQLite's locks.

    Raises:
        DirectoryError: One is no regular file, or too large.
        DamageError: The journal names a file that SQLite would delete.
    """
    for suffix in SUFFIXES:
        with suppress(FileNotFoundError):
            check_regular(with_suffix(path, suffix), most=MOST_BYTES, follow_links=False)
    check_journal(path)


def check_journal(path: Path) -> None:
    """Raise DamageError if the journal of a database names a file that SQLite would delete.

    It is a super-journal, which SQLite writes for a transaction over several databases, and deletes
    after a rollback. This project has no such transactions.
    """
    journal = with_suffix(path, "-journal")
    flags = os.O_RDONLY | os.O_NOFOLLOW
    with suppress(FileNotFoundError), regular_stream(journal, flags, most=MOST_BYTES) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_JOURNAL_MAGIC)))
        # The magic number at the end says that a name is before it; a journal begins with it too.
        if file.tell() > 0 and file.read() == _JOURNAL_MAGIC:
            message = (
                f"{journal} was found, and it names a file for SQLite to delete: this program"
                " never writes such a journal. Remove it if you do not know where it is from."
            )
            raise DamageError(message)


def connect(path: Path) -> sqlite3.Connection:
    """Open a database that any thread may use and write to; create it if it does not exist.

    Raises sqlite3.Error, or DirectoryError for a pipe, a device or a file of implausible size.
    """
    check_database(path)
    # Transactions are begun by hand (isolation_level), by one thread at a time (the caller's lock).
    return sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)


class Database:
    """A connection that writes, for one thread at a time (the caller's lock)."""

    def __init__(self, path: Path) -> None:
        """Connect as ``connect``; a forked child leaks its copy."""
        with at_fork.guard:
            self.connection = connect(path)
            at_fork.abandon_in_children(self)

    @contextmanager
    def transaction(self, disk: SystemDisk, kind: str = "") -> Iterator[sqlite3.Connection]:
        """Make the block's statements durable, or undo all of them if one raises an error."""
        self.connection.execute(f"BEGIN {kind}")
        try:
            yield self.connection
            disk.end_transaction(self.connection)
        finally:
            # After some errors, such as a full disk, SQLite has rolled back by itself.
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def checkpoint(self) -> None:
        """Write the log back to the database."""
        # PASSIVE waits for no reader: the next checkpoint writes back what was left.
        self.connection.execute("PRAGMA main.wal_checkpoint(PASSIVE)").fetchone()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.connection.close()

    def abandon(self) -> None:
        """Leak a child's copy: closing it would change the parent's files."""
        # A reference that nobody drops keeps the connection from being closed when it is collected.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.connection))


def log_bytes(path: Path) -> int:
    """Return the bytes of the write-ahead log of a database; 0 if there is none."""
    log = with_suffix(path, "-wal")
    return log.stat().st_size if log.exists() else 0


def connect_to_read(path: Path, *, is_still: bool = False) -> sqlite3.Connection:
    """Open a database that is only read: SQLite leaves its log alone, also at the end.

    If it ``is_still`` and its log empty, SQLite makes no files next to it. Raises as ``connect``.
    """
    check_database(path)
    immutable = "&immutable=1" if is_still and not log_bytes(path) else ""
    uri = f"file:{quote(str(path))}?mode=ro{immutable}"
    return sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)


def set_journal(connection: sqlite3.Connection, journal: tuple[str, str]) -> None:
    """Set how a transaction is made whole: the modes of SQLite's journal and of its syncs."""
    mode, synchronous = journal
    connection.execute(f"PRAGMA journal_mode = {mode}")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    # The log is copied by hand after commits: else adding a snapshot might copy all of it. A log
    # that begins anew is as long as what was written since.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA journal_size_limit = 0")


def check_marks(connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether there is a manifest: False for an empty database, a store under creation.

    Raises StoreFormatError if it is another program's, newer than this version, or damaged.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not application and not tables:
        return False
    if application != APPLICATION:
        reason = f"it is another program's database (mark {application:#010x})"
        # A flipped bit in the header also makes a mark look like another program's.
        raise damaged(path, reason) if _is_ours(path) else _foreign(path, reason)
    version = read_format(connection)
    if version < FORMAT:
        message = (
            f"{path} was written in store format {version} by an older tensorstow; this version"
            f" reads {FORMAT}, in which every row has a digest. Resume it with the version that"
            " wrote it, save state_dict() there, and load that into a run in another directory."
        )
        raise StoreFormatError(message)
    if version > FORMAT:
        message = (
            f"{path} was written in store format {version} by tensorstow"
            f" {read_meta(connection, 'writer')}; this version reads {FORMAT}. Install that"
            " version or a newer one."
        )
        raise StoreFormatError(message)
    return True


def read_format(connection: sqlite3.Connection) -> int:
    """Return the version of the format that a manifest is in."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def read_meta(connection: sqlite3.Connection, key: str) -> str:
    """Return one value of the table meta; "(unknown)" where it has none."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(row[0]) if row else "(unknown)"


def read_failure(path: Path, error: sqlite3.Error) -> StoreError:
    """Return the exception for ``error``, met while nothing was being written."""
    # Our statements are right for our tables: if one is wrong, the tables are others.
    is_other = _primary(error) in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
    if is_other and not _is_ours(path):
        return _foreign(path, str(error))
    if is_other or _primary(error) == sqlite3.SQLITE_CORRUPT:
        return damaged(path, str(error))
    message = (
        f"The manifest {path} was to be read: {error} ({_name(error)}). Look at the permissions of"
        " the directory, its free space, and `dmesg`."
    )
    return CommitError(message)


def write_failure(path: Path, error: sqlite3.Error) -> StoreError | OptionError:
    """Return the exception for ``error``, met in a transaction that was rolled back.

    An I/O error is different from the rest: whether the transaction will be seen after a power
    loss is not known.
    """
    primary = _primary(error)
    if primary in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
        return damaged(path, str(error))
    if primary == sqlite3.SQLITE_CONSTRAINT:
        message = (
            f"A commit was requested in which two records are the same chunk or tensor ({error})."
            " Give each chunk its own number, each tensor its own kind and name."
        )
        return OptionError(message)
    text = f"The manifest {path} was to be written: {error} ({_name(error)})."
    if primary == sqlite3.SQLITE_IOERR:
        message = (
            f"{text} Whether the last transaction is durable is not known, so no more are begun."
            f" {advice_for(codes.EIO)} Opening the store again finds the last one that is whole."
        )
        return SyncError(message)
    advice = {
        sqlite3.SQLITE_FULL: advice_for(codes.ENOSPC),
        sqlite3.SQLITE_READONLY: advice_for(codes.EROFS),
        sqlite3.SQLITE_BUSY: "Something else has the file open: end it and try again.",
    }.get(primary, "Look at the message, and at `dmesg`.")
    return CommitError(f"{text} What was committed before is whole. {advice}")


def damaged(path: Path, difference: str) -> DamageError:
    """Return the exception for a manifest whose contents are not those that were written."""
    message = (
        f"The manifest {path} was to be read and is damaged: {difference}. Nothing was changed."
        f" `tensorstow run recover {path.parent}` says what is whole, and makes a manifest of that;"
        " or restore the directories from a copy, or name another one for a new run."
    )
    return DamageError(message)


def _is_ours(path: Path) -> bool:
    """Return whether states lie next to a file, so that it was a manifest once."""
    return path.with_name("states-0.bin").exists()


def _foreign(path: Path, reason: str) -> StoreFormatError:
    message = (
        f"{path} was requested as a store's manifest: {reason}. It was not touched: name another"
        " directory."
    )
    return StoreFormatError(message)


def _primary(error: sqlite3.Error) -> int:
    # The low byte of an extended code is its primary one.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _name(error: sqlite3.Error) -> str:
    return str(getattr(error, "sqlite_errorname", type(error).__name__))
