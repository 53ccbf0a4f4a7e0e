"""Opens files by name, and only regular files of a plausible size.

[Note: Regular files] A directory can hold a pipe, a device, or a sparse file of a TiB under the
name of a file that is read here. A pipe is waited for without end, ``/dev/zero`` has no end, and
opening a device can do something. So a file is looked at before it is opened (``stat``), opened
without waiting, and looked at again by its descriptor, as another one may have its name by then.
Code that has files opened by a library (SQLite, safetensors, torch) calls ``check_regular`` first.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tensorstow.base.errors import DirectoryError, named
from tensorstow.base.sizes import format_bytes

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
}


MOST_TEXT_BYTES = 64 << 20
"""No configuration, index or profile is larger."""


def remove_file(path: Path) -> None:
    """Remove a file, if there is one.

    Raises:
        DirectoryError: It cannot be removed.
    """
    with named("The removal of", path):
        path.unlink(missing_ok=True)


def is_there(path: Path) -> bool:
    """Return whether ``path`` is the name of anything; raise DirectoryError if it cannot be said.

    ``os.path.lexists`` takes any error for a no.
    """
    with named("File", path):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # nothing can have this name
                return False
            raise
    return True


def open_regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o666,
    *,
    most: int | None = None,
) -> int:
    """Open a regular file; never wait for it, and never touch anything else.

    Args:
        path: The file.
        flags: As of ``os.open``. With ``os.O_NOFOLLOW`` a symbolic link raises an error.
        mode: The permissions of a file that is created.
        most: The largest plausible size in bytes. Default: None, any size.

    Returns:
        The descriptor.

    Raises:
        DirectoryError: It is no regular file, or larger than ``most``.
        OSError: The system cannot open it.
    """
    try:
        check_regular(path, most=most, follow_links=not flags & os.O_NOFOLLOW)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    # Without O_NONBLOCK, opening a pipe that took the file's place would wait for its other end.
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    try:
        _check(path, os.fstat(fd), most)
        os.set_blocking(fd, True)  # io_uring reports EAGAIN for other descriptors
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def regular_stream(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, most: int | None = None
) -> Iterator[BinaryIO]:
    """Yield a regular file as a stream for reading; arguments and errors are ``open_regular``'s."""
    with os.fdopen(open_regular(path, flags, most=most), "rb") as stream:
        yield stream


def read_regular(path: str | os.PathLike[str], most: int, flags: int = os.O_RDONLY) -> bytes:
    """Return the contents of a regular file that is read whole: at most ``most`` bytes.

    Arguments and errors are ``open_regular``'s.
    """
    with regular_stream(path, flags, most=most) as stream:
        # One byte more than is plausible, and no more: a file that grows is not read to its end.
        data = stream.read(most + 1)
        _check(path, os.fstat(stream.fileno()), most)  # it may have grown meanwhile
    return data


def check_regular(
    path: str | os.PathLike[str], *, most: int | None = None, follow_links: bool = True
) -> os.stat_result:
    """Return the facts of a regular file, or of one that it is a link to; else raise an error.

    Raises:
        DirectoryError: It is no regular file, or larger than ``most`` bytes.
        OSError: The system has no such file, or does not say.
    """
    facts = Path(path).stat(follow_symlinks=follow_links)
    _check(path, facts, most)
    return facts


def memory_bytes() -> int:
    """Return the memory of this machine: a file that is read whole has no more."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check(path: str | os.PathLike[str], facts: os.stat_result, most: int | None) -> None:
    name = Path(path)
    kind = stat.S_IFMT(facts.st_mode)
    if kind != stat.S_IFREG:
        actual = _KINDS.get(kind, "something else")
        message = (
            f"File {name} was requested, and it is {actual} where a regular file is expected."
            " Remove it and restore the original file, or name another one."
        )
        raise DirectoryError(message)
    if most is not None and facts.st_size > most:
        message = (
            f"File {name} was requested, and it has {format_bytes(facts.st_size)} where at most"
            f" {format_bytes(most)} are plausible. Nothing of it is used: it is damaged, sparse,"
            " or another kind of file. Restore the original, or name another one."
        )
        raise DirectoryError(message)


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text of a regular file; a pipe or a device would be waited for, or has no end.

    Raises:
        DirectoryError: It is no regular file, or it is larger than ``MOST_TEXT_BYTES``.
        OSError: There is no such file, or it cannot be read.
        ValueError: It is no text, or ``path`` can be no path.
    """
    return read_regular(path, MOST_TEXT_BYTES).decode(encoding, errors)
