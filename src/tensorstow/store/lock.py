"""The lock of a directory: one process at a time, named in the refusal.

[Note: Local locks] On some shared filesystems, such as sshfs, a lock holds on its own machine
alone. There the name that a holder writes to the file is believed too: it is removed when the
holder ends, and what a killed one of another machine left has to be removed by hand.
"""

import contextlib
import errno as codes
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorstow.base.errors import DirectoryError, LockedError, StoreFormatError, named
from tensorstow.base.machine import is_gone, process_id
from tensorstow.base.mounts import mount_of
from tensorstow.base.regular_file import open_regular, read_regular
from tensorstow.store import at_fork

LOCK_NAME = "lock"
_TEXT_BYTES = 400  # more than a host name may have
_MOST_BYTES = 1 << 20  # a lock is two lines of text: the holder in words, and as JSON
_PATIENCE_SECONDS = 1.0  # `peek` holds a shared lock for a few milliseconds


class DirectoryLock:
    """The right to use a directory's store. It ends with the process, however that ends."""

    def __init__(self, directory: Path) -> None:
        """Take it, or raise LockedError, which names the holder."""
        self.path = directory / LOCK_NAME
        self._fd = -1
        self._is_signed = False
        """Whether the file has this process's name."""
        try:
            self._acquire(directory)
        except BaseException:
            self.release()
            raise

    def _acquire(self, directory: Path) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._try():
            if time.monotonic() > deadline:
                message = (
                    f"The store in {directory} was requested but is held by"
                    f" {read_holder(self.path)}. Wait until that is over, or name another"
                    " directory."
                )
                raise LockedError(message)
            time.sleep(0.02)
        self._check_is_ours()
        is_local = mount_of(directory.resolve()).has_local_locks
        if (holder := _holder_elsewhere(self._fd, directory)) is not None:
            message = (
                f"The store in {directory} was requested but is held by {holder}; else wait, or"
                " name another directory."
            )
            raise LockedError(message)
        text = f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}"
        # Over the one before, so that it needs no room; and a courtesy, which a full disk that is
        # opened for reading may do without.
        text += f"\n{json.dumps(process_id())}\n"
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, text.encode().ljust(_TEXT_BYTES), 0)
            self._is_signed = True
            if is_local:
                os.fsync(self._fd)  # other machines read it

    def _check_is_ours(self) -> None:
        mark = os.pread(self._fd, 4, 0)
        # A new file, a holder's name, or the blanks that `release` leaves.
        if mark not in {b"", b"pid ", b"    "}:
            message = (
                f"The lock {self.path} was requested and there is another program's file of that"
                " name. It was not touched: name another directory."
            )
            raise StoreFormatError(message)

    def opened(self) -> os.stat_result:
        """Return the facts of the file that is locked."""
        return os.fstat(self._fd)

    def release(self) -> None:
        """Release the lock. Idempotent; the file stays, since another process may wait for it."""
        if self._is_signed:
            self._is_signed = False
            with contextlib.suppress(OSError):
                # While the lock is held: later the name would be the next holder's.
                os.pwrite(self._fd, b" ".ljust(_TEXT_BYTES), 0)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """Close a child's copy, so that only the parent keeps the lock alive."""
        # The name stays, because the parent holds the lock.
        self._is_signed = False
        self.release()

    def _try(self) -> bool:
        with at_fork.guard:
            self._fd = _open(self.path)
            at_fork.abandon_in_children(self)
        if _lock(self._fd, fcntl.LOCK_EX, self.path) and _is_named(self._fd, self.path):
            return True
        self.release()
        return False


@contextmanager
def peek(directory: Path) -> Iterator[str | None]:
    """Yield the holder of a directory's store, or None; then the store cannot be opened meanwhile.

    Nothing is written, and several readers may peek at once.
    """
    path, owner = directory / LOCK_NAME, os.getpid()
    try:
        with at_fork.guard:
            fd = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW, most=_MOST_BYTES)
    except DirectoryError:
        raise  # no answer: something else has the lock's name
    except OSError:
        yield None  # no lock was ever taken here
        return
    try:
        is_free = _lock(fd, fcntl.LOCK_SH, path)
        yield _holder_elsewhere(fd, directory) if is_free else read_holder(path)
    finally:
        # A child that was forked meanwhile has a copy of the descriptor, and may not unlock it.
        if os.getpid() == owner:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _holder_elsewhere(fd: int, directory: Path) -> str | None:
    """Return the holder that a locked file names and that may be alive: [Note: Local locks]."""
    if not mount_of(directory.resolve()).has_local_locks:
        return None
    holder, _, process = os.pread(fd, _TEXT_BYTES, 0).decode(errors="replace").partition("\n")
    if not holder.strip() or _is_gone(process):
        return None
    return (
        f"{holder.strip()}, or that process was killed: locks of this filesystem do not reach other"
        f" machines. If it is over, delete {directory / LOCK_NAME}"
    )


def _is_gone(process: str) -> bool:
    """Return whether a process has ended; False if nobody knows."""
    try:
        return bool(is_gone(json.loads(process)))
    except (LookupError, TypeError, ValueError):
        return False


def read_holder(path: Path) -> str:
    """Return the text that the holder wrote to the lock file ``path``."""
    try:
        data = read_regular(path, _MOST_BYTES, os.O_RDONLY | os.O_NOFOLLOW)
        text = data.decode(errors="replace").partition("\n")[0].strip()
    except OSError:
        text = ""
    if text.startswith(f"pid {os.getpid()} on {socket.gethostname()} "):
        return f"this process itself ({text})"
    return text or "a process that has not said which"


def _open(path: Path) -> int:
    # Through a link, the holder's name would be written over another file.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with named("The lock", path):
        return open_regular(path, flags, 0o600, most=_MOST_BYTES)


def _lock(fd: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        # On NFS flock is a lock of fcntl, which may answer EACCES if another process has it.
        if error.errno in {codes.EWOULDBLOCK, codes.EACCES}:
            return False
        message = (
            f"The lock {path} was requested and the filesystem gives none ({error.strerror}): two"
            " runs could write to one store. Name a directory on a filesystem with flock."
        )
        raise DirectoryError(message) from error
    return True


def _is_named(fd: int, path: Path) -> bool:
    """Return whether ``path`` is still the locked file: it may have been removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
