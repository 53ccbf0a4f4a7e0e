"""Finds a generation by number or snapshot name, and those that may be dropped.

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
from typing import TypeVar

from tensorstow.base.errors import DirectoryError, OptionError, advice_for
from tensorstow.io.files import File
from tensorstow.store.records import Generation, Summary

_T = TypeVar("_T", Summary, Generation)
_FIRST = 1 << 62
# POSIX allows both answers for a lock that another process has.
_BUSY = {codes.EAGAIN, codes.EACCES}


def find(generations: Sequence[_T], which: str | int) -> _T:
    """Return the generation with that number or snapshot's name."""
    for summary in generations:
        if which == summary.number or which in summary.names:
            return summary
    listed = ", ".join(
        f"{summary.number} ({', '.join(summary.names)})" if summary.names else str(summary.number)
        for summary in generations
    )
    asked = f"snapshot {which!r}" if isinstance(which, str) else f"generation {which}"
    message = f"The {asked} was requested and is not there. There are: {listed or 'none at all'}."
    raise OptionError(message)


def droppable(generations: Sequence[Summary], keep: int | None = None) -> list[int]:
    """Return the generations that no snapshot pins, but for the one with number ``keep``."""
    return [s.number for s in generations if not s.names and s.number != keep]


def check_name(generations: Sequence[Summary], name: str, number: int | None) -> Summary:
    """Return the generation (the newest) to call ``name``, which must be new and a name."""
    # Checked here, for an error in the middle of the transaction would end the store.
    if not is_name(name):
        message = (
            f"A snapshot {name!r} was requested: give a name of printable characters with a letter"
            " in it."
        )
        raise OptionError(message)
    if not generations:
        message = f"A snapshot {name!r} was requested and nothing is committed yet: commit first."
        raise OptionError(message)
    for summary in generations:
        if name in summary.names:
            message = (
                f"A snapshot {name!r} was requested and generation {summary.number} has that name:"
                " drop it first, or give another one."
            )
            raise OptionError(message)
    return generations[-1] if number is None else find(generations, number)


def is_name(name: object) -> bool:
    """Return whether the command can print it, SQLite can keep it, and it is no number."""
    return (
        isinstance(name, str) and bool(name.strip()) and name.isprintable() and not name.isdigit()
    )


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
        # Those that were not locked too: unlocking them does nothing.
        for number in numbers:
            _is_free(file, number, fcntl.F_UNLCK)


def _is_free(file: File, number: int, kind: int = fcntl.F_WRLCK) -> bool:
    try:
        return _lock(file, kind, number)
    except OSError:
        return True  # without locks nobody has pinned it


def _lock(file: File, kind: int, number: int) -> bool:
    # struct flock: type, whence, start, length, and a pid, which is 0 for locks of open files.
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, _FIRST + number, 1, 0)
    try:
        fcntl.fcntl(file.fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True
