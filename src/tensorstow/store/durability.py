"""Everything that makes writes durable, in one interface that tests replace.

[Note: Durability] A commit is durable because three things happen in this order: data is written,
`sync_file` returns, the manifest's transaction ends. A file exists because its directory was
synced after it was made. A killed process cannot show that one of these is missing, since the
page cache and the drive's cache outlive it; so tests put a recorder here, log writes and barriers
in order, and replay a power loss at every point of the log.
"""

import os
import sqlite3
from pathlib import Path

import tensorstow._native as _native
from tensorstow.base.regular_file import open_regular
from tensorstow.io.files import File, compare_with_drive, open_file


class SystemDisk:
    """The system calls of a store whose order matters; tests record them, or let them fail."""

    def create(self, path: Path, contents: bytes) -> None:
        """Make the new file ``path``, its owner's alone; nothing is durable yet."""
        # Not through a link that somebody has put there: its target would be overwritten.
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(contents)

    def open(self, engine: _native.Engine, path: Path) -> File:
        """Open the data file ``path``, which exists."""
        return open_file(engine, path, access=os.O_RDWR | os.O_NOFOLLOW)

    def sync_file(self, file: File) -> None:
        """Return once all that was written to ``file`` before is durable."""
        os.fdatasync(file.fd)  # with the file's length, which reading needs; without its times

    def sync_directory(self, path: Path) -> None:
        """Return once the names in ``path`` are durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def end_transaction(self, connection: sqlite3.Connection) -> None:
        """Make the manifest's open transaction durable, whole or not at all."""
        connection.execute("COMMIT")

    def read_back(self, path: Path, start: int) -> None:
        """Raise OSError unless the drive has the bytes of ``path`` from ``start`` on."""
        compare_with_drive(path, start)
