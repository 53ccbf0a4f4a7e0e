"""Generations that other processes read, which no commit drops.

[Note: Pins] A process that reads a generation of a live run holds a read lock on one byte of the
run's first data file: the generation's number, beyond any byte that the file has. Whoever drops a
generation takes the write lock on its byte, and keeps the generation if another process has it. The
reader looks into the manifest after it has the lock: a generation that is still there then stays
until the reader ends, however it ends. The locks are of open files (OFD) and not of processes, so
that the end of another reader in the process does not release them.
"""

import errno as codes
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tensorstow.base.errors import DirectoryError, advice_for
from tensorstow.io.files import File

_FIRST = 1 << 62
_BUSY = {codes.EAGAIN, codes.EACCES}


def pin(file: File, number: int) -> bool:
    """Keep a generation from being dropped while ``file`` is open; return False if it is now.

    Raises DirectoryError if the filesystem has no locks.
    """
    try:
        return _lock(file, fcntl.F_RDLCK, number)
    except OSError as error:
        message = (
            f"A lock of {file.path} was requested, to read what its run has committed, and the"
            f" filesystem gives none ({os.strerror(error.errno or codes.EIO)}). End the run first."
            f" {advice_for(error.errno or codes.EIO)}"
        )
        raise DirectoryError(message) from error


@contextmanager
def dropping(file: File, numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield those of the generations ``numbers`` that nobody reads, or can read till the end."""
    try:
        yield [number for number in numbers if _is_free(file, number)]
    finally:
        for number in numbers:
            _is_free(file, number, fcntl.F_UNLCK)


def _is_free(file: File, number: int, kind: int = fcntl.F_WRLCK) -> bool:
    try:
        return _lock(file, kind, number)
    except OSError:
        return True  # without locks nobody has pinned it


def _lock(file: File, kind: int, number: int) -> bool:
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, _FIRST + number, 1, 0)
    try:
        fcntl.fcntl(file.fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True
