"""The manifest: an SQLite file with all generations and what each refers to."""

import errno as codes
import logging
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib.metadata import version
from pathlib import Path

from tensorstow.base.directories import DirectoryFacts
from tensorstow.base.errors import CommitError, SyncError, advice_for
from tensorstow.store.datafiles import Head
from tensorstow.store.durability import SystemDisk
from tensorstow.store.manifest_copy import COPY_NAME, ManifestCopy
from tensorstow.store.records import Content, Extent, Generation, Summary
from tensorstow.store.rows import (
    delete_generations,
    insert_generation,
    insert_name,
    note_last_number,
    read_directories,
    read_extents,
    read_summaries,
    seal,
)
from tensorstow.store.schema import (
    APPLICATION,
    FORMAT,
    TABLES,
    Database,
    check_marks,
    log_bytes,
    read_failure,
    read_meta,
    set_journal,
    with_suffix,
    write_failure,
)
from tensorstow.store.verify import check_all, check_heads, check_shared, load

logger = logging.getLogger("tensorstow")

_LONG_LOG_BYTES = 4 << 20
_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "afs",
    "virtiofs",
)
_warned_network: set[Path] = set()


class Journal(Enum):
    """How SQLite makes a transaction whole.

    A write-ahead log needs memory shared by all processes that open the file, which network
    filesystems do not provide.
    """

    WRITE_AHEAD = ("WAL", "FULL")
    ROLLBACK = ("DELETE", "EXTRA")  # EXTRA: the directory is synced after the journal is unlinked


def choose_journal(facts: DirectoryFacts) -> Journal:
    """Return the journal that works in a directory; warn once where it is not the quick one."""
    if not facts.mount.filesystem.startswith(_NETWORK):
        return Journal.WRITE_AHEAD
    if facts.path not in _warned_network:
        _warned_network.add(facts.path)
        logger.warning(
            "%s is on a network filesystem (%s from %s): the manifest does without a write-ahead"
            " log, so each commit waits for a few more syncs; a local directory is quicker",
            facts.path,
            facts.mount.filesystem,
            facts.mount.device,
        )
    return Journal.ROLLBACK


class Manifest:
    """The tables of one store. Any thread may call any method; they take turns."""

    def __init__(
        self, path: Path, disk: SystemDisk, journal: Journal, *, is_checked: bool = False
    ) -> None:
        """Open ``path``; raise StoreFormatError unless it is empty or a manifest.

        DamageError if it is damaged; not looked for if it ``is_checked``.
        """
        self.path = path
        self._disk = disk
        self.second = SecondManifest(path, disk, journal)
        """Its copy ([Note: Two manifests])."""
        self.lock = threading.RLock()
        """Held for several queries of one state."""
        try:
            self._database = Database(path)
        except sqlite3.Error as error:
            raise read_failure(path, error) from error
        try:
            with self._reading() as connection:
                self.is_new = not check_marks(connection, path)
                if not self.is_new and not is_checked:
                    check_all(connection, path)
                self.transaction = 0 if self.is_new else int(read_meta(connection, "transaction"))
                """The number of the last one."""
                self.run = "" if self.is_new else read_meta(connection, "run")
                """The id that the data files carry too."""
                # After the checks, because a change of the journal's mode writes to the file.
                set_journal(connection, journal.value)
        except BaseException:
            self.close()
            raise

    def files(self) -> list[Path]:
        """Return the files that SQLite has open, with the logs if there are any."""
        paths = [
            with_suffix(path, end) for path in self.second.paths() for end in ("", "-wal", "-shm")
        ]
        return [path for path in paths if path.exists()]

    def begin_run(self, run: str, directories: Sequence[Path]) -> None:
        """Make the tables of a new store."""
        self.run = run
        with self._transaction() as connection:
            # Both marks are in the database's header, so they are part of the transaction.
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            # executescript() would first end the transaction.
            for statement in TABLES.split(";"):
                connection.execute(statement)
            marks = [("run", run), ("writer", version("tensorstow"))]
            connection.executemany("INSERT INTO meta VALUES (?, ?)", marks)
            rows = [(file, str(path)) for file, path in enumerate(directories)]
            connection.executemany("INSERT INTO files VALUES (?, ?)", rows)
        self.is_new = False
        self.checkpoint(longer_than=0)  # a log that is damaged is not all that there is

    def check_heads(self, data_files: Sequence[Path]) -> int:
        """Return the last transaction recorded by all heads; raise DamageError if one was lost."""
        with self._reading() as connection:
            return check_heads(connection, self.path, data_files, self.transaction)

    def head(self) -> Head:
        """Return the head to be written to the data files."""
        newest = self.summaries()[-1:]
        return Head(
            self.run,
            self.transaction,
            newest[0].number if newest else 0,
            newest[0].step if newest else 0,
        )

    def note_directories(self, directories: Sequence[Path]) -> bool:
        """Record the paths of the data files; return whether they were moved."""
        with self._reading() as connection:
            if read_directories(connection) == list(directories):
                return False
        with self._transaction() as connection:
            rows = [(str(path), file) for file, path in enumerate(directories)]
            connection.executemany("UPDATE files SET directory = ? WHERE file = ?", rows)
        return True

    def summaries(self) -> list[Summary]:
        """Return all kept generations, oldest first."""
        with self._reading() as connection:
            return read_summaries(connection)

    def load(self, summary: Summary) -> Generation:
        """Return all of the generation that ``summary`` is of."""
        with self._reading() as connection:
            return load(connection, self.path, self.run, summary.number)

    def extents(self) -> dict[int, list[Extent]]:
        """Return the extents of every kept generation by its number."""
        with self._reading() as connection:
            return read_extents(connection)

    def add(self, content: Content, created: float, drop: Sequence[int]) -> int:
        """Add a generation and remove others in one transaction; return its number."""
        with self._transaction() as connection:
            number = insert_generation(connection, self.run, content, created)
            delete_generations(connection, drop)
            writer = ("writer", version("tensorstow"))
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", writer)
        return number

    def put_back(
        self, generations: Sequence[Generation], transaction: int, last_number: int
    ) -> None:
        """Add generations of another manifest of the run as they were, as this transaction.

        ``last_number``: the highest number that a generation ever had.
        """
        # The transaction below adds one when it is durable.
        self.transaction = transaction - 1
        with self._transaction() as connection:
            for generation in generations:
                created, number = generation.created, generation.number
                insert_generation(connection, self.run, generation, created, number)
                for name in generation.names:
                    insert_name(connection, self.run, name, number)
            note_last_number(connection, last_number)

    def add_snapshot(self, name: str, number: int) -> None:
        """Add a snapshot."""
        with self._transaction() as connection:
            insert_name(connection, self.run, name, number)

    def drop_snapshot(self, name: str, drop: Sequence[int]) -> None:
        """Remove a snapshot and generations in one transaction."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM snapshots WHERE name = ?", (name,))
            delete_generations(connection, drop)

    def drop(self, numbers: Sequence[int]) -> None:
        """Remove generations."""
        with self._transaction() as connection:
            delete_generations(connection, numbers)

    def checkpoint(self, *, longer_than: int | None = None) -> None:
        """Write a long log back to the database, so that it does not grow without bound."""
        least = _LONG_LOG_BYTES if longer_than is None else longer_than
        with self.lock:
            try:
                if log_bytes(self.path) > least:
                    self._database.checkpoint()
                    self.second.checkpoint()
            except sqlite3.Error as error:
                raise write_failure(self.path, error) from error

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self.lock:
            self.second.close()
            self._database.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self.lock:
            try:
                yield self._database.connection
            except sqlite3.Error as error:
                raise read_failure(self.path, error) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self.lock:
            try:
                # IMMEDIATE: a writer elsewhere is an error now
                with self._database.transaction(self._disk, "IMMEDIATE") as connection:
                    # Else the new seal would cover rows that were damaged since the last one.
                    if self.transaction:
                        check_shared(connection, self.path)
                    yield connection
                    seal(connection, self.transaction + 1)
                # Only now: heads must not name a transaction that was rolled back.
                self.transaction += 1
            except sqlite3.Error as error:
                raise write_failure(self.path, error) from error


class SecondManifest:
    """The copy of a manifest, and the check that the drive returns both."""

    def __init__(self, path: Path, disk: SystemDisk, journal: Journal) -> None:
        """Keep no copy yet of the manifest at ``path``."""
        self.path = path
        self._disk = disk
        self._journal = journal
        self._copy: ManifestCopy | None = None
        self._read_back: dict[Path, int] = {}
        """Bytes of each log that came back from the drive."""

    def paths(self) -> list[Path]:
        """Return the manifest, and its copy if there is one."""
        return [self.path, *([] if self._copy is None else [self._copy.path])]

    def keep(self) -> None:
        """Keep a copy of it from now on: [Note: Two manifests]. A full disk is logged."""
        path = self.path.with_name(COPY_NAME)
        with _without_copy(path, f"until {path} is opened again"):
            self._copy = ManifestCopy(self.path, self._disk, self._journal.value)

    def checkpoint(self) -> None:
        """Write the log of the copy into it."""
        if self._copy is not None:
            self._copy.checkpoint()

    def close(self) -> None:
        """Close the copy."""
        if self._copy is not None:
            self._copy.close()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Write the last transaction to the copy, and read both back, while the block runs.

        Raises SyncError if the drive fails. A full disk is logged: the next transaction may find
        room, and the copy is complete then.
        """
        failures: list[BaseException] = []

        def work() -> None:
            try:
                # First the copy, whose file is then read back too.
                self._update_copy()
                self._check_drive()
            except BaseException as error:  # noqa: BLE001  # raised below
                failures.append(error)

        # Both wait for the drive, which has one flush for both.
        thread = threading.Thread(target=work, name="tensorstow-manifest-copy")
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and starts none any more
            work()
        try:
            yield
        finally:
            # A thread that did not start cannot be joined.
            if thread.ident is not None:
                thread.join()
        for error in failures:
            raise error

    def _update_copy(self) -> None:
        if self._copy is not None:
            with _without_copy(self._copy.path, "of its last transaction"):
                self._copy.update()

    def _check_drive(self) -> None:
        """Raise SyncError unless the drive returns what was written since the last time."""
        for path in self.paths():
            log = with_suffix(path, "-wal")
            written = log if log.exists() else path
            try:
                size = written.stat().st_size
                # A log that is no longer than before has begun anew: all of it is read back.
                start = self._read_back.get(written, 0)
                self._disk.read_back(written, start if log == written and size > start else 0)
            except FileNotFoundError:
                continue  # the check of links reports it
            except OSError as error:
                message = (
                    f"{written} was written, and did not come back from the drive as it was:"
                    f" {error.strerror}. {advice_for(codes.EIO)} Opening the store again finds the"
                    " last transaction that is whole."
                )
                raise SyncError(message) from error
            self._read_back[written] = size


@contextmanager
def _without_copy(path: Path, lacking: str) -> Iterator[None]:
    """Log an error of writing the copy that leaves the manifest as it is, such as a full disk."""
    message = "The manifest has no second copy %s: %s"
    try:
        yield
    except sqlite3.Error as error:
        failure = write_failure(path, error)
        if not isinstance(failure, CommitError):
            raise failure from error
        logger.warning(message, lacking, failure)
    except OSError as error:
        if error.errno not in {codes.ENOSPC, codes.EDQUOT}:
            raise
        logger.warning(message, lacking, error)
