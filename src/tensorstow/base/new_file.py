"""New files, which get their name when they are complete.

[Note: New files] Every file that this project writes to replace another one is a ``NewFile``. It
has no name until then (O_TMPFILE): a process that is killed leaves nothing, and no other process
can open it. A filesystem without such files gives it a random name that must be new (O_EXCL), so
that no symbolic link is followed. A killed process leaves that one; the next writer in the
directory removes it after a day.
"""

import errno as codes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Self

from tensorstow.base.errors import named

RANDOM = "[0-9a-f]" * 16
"""Matches the random part of a name."""
_MAKING = ".tensorstow-"
_MOST_NAMELESS = 128
"""Files of a set that take a descriptor until they are published."""
_DAY = 86_400
_NO_TMPFILE = {codes.EOPNOTSUPP, codes.EISDIR, codes.EINVAL, codes.ENOENT}


class NewFile:
    """A file that is written through its descriptor ``fd`` and then replaces ``path``.

    As a context manager it is discarded at the end, unless it was published. Methods raise
    DirectoryError if the system refuses what they do.

    Args:
        path: The name that it will have. Whatever has that name stays until then.
        nameless: Whether it has no name until then, if the filesystem can do that. Such a file
            takes a descriptor until it is published. Default: True.
        mode: Its permissions, of which the umask takes some. Default: 0o666, as of ``open``.

    Raises:
        DirectoryError: No file can be created there.
    """

    def __init__(self, path: Path, *, nameless: bool = True, mode: int = 0o666) -> None:
        self.path = path
        self._is_sealed = self._is_kept = False
        with named("File", path):
            self.fd, self._made = open_new(path.parent, mode, nameless=nameless)

    @contextmanager
    def stream(self) -> Iterator[BinaryIO]:
        """Yield the file as a stream; seal it after the block."""
        with named("File", self.path), os.fdopen(os.dup(self.fd), "wb") as opened:
            yield opened
        self.seal()

    def seal(self) -> None:
        """Make the contents durable after the last write."""
        with named("File", self.path):
            if not self._is_sealed:
                os.fsync(self.fd)
            # A file that has a name is published by a rename, which needs no descriptor.
            if self._made is not None:
                self._close()
        self._is_sealed = True

    def keep(self) -> None:
        """Seal it and give it a name next to ``path``, under which a later failure leaves it."""
        self.seal()
        with named("File", self.path):
            # Not a name like ``_MAKING``: the next writer would remove such a file after a day.
            self._made = self._have_name().rename(
                self.path.with_name(f".{self.path.name}.{os.urandom(8).hex()}")
            )
        self._is_kept = True

    def publish(self) -> None:
        """Seal it and give it its name, durably."""
        self.seal()
        with named("File", self.path):
            # A link gets a name that is free; only a rename replaces another file.
            if self._made is not None or not self._links(self.path):
                self._have_name().replace(self.path)
                self._made = None
            sync_directory(self.path.parent)
        self._close()

    def discard(self) -> None:
        """Close it; it is gone unless it was published or kept. Idempotent."""
        self._close()
        if self._made is not None and not self._is_kept:
            self._made.unlink(missing_ok=True)
            self._made = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()

    def _have_name(self) -> Path:
        while self._made is None:
            name = _random_name(self.path.parent)
            self._made = name if self._links(name) else None
        return self._made

    def _links(self, name: Path) -> bool:
        """Give the file a name; return False if another file has it."""
        try:
            # Without a directory Python links the symbolic link and not the file.
            os.link(f"/proc/self/fd/{self.fd}", name, src_dir_fd=self.fd, follow_symlinks=True)
        except FileExistsError:
            return False
        return True

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class NewFiles:
    """New files that replace a set of older ones; as a context manager it discards them.

    Keep all of them, remove the older ones, and publish: then the contents of one of both sets are
    on disk at any time, also if the process is killed.
    """

    def __init__(self) -> None:
        self._files: list[NewFile] = []

    def create(self, path: Path) -> NewFile:
        """Return a new file of the set, which will have the name ``path``.

        Raises:
            DirectoryError: No file can be created there.
        """
        self._files.append(NewFile(path, nameless=len(self._files) < _MOST_NAMELESS))
        return self._files[-1]

    def keep(self) -> None:
        """Seal them and give them random names, under which a later failure leaves them."""
        for file in self._files:
            file.keep()

    def publish(self) -> None:
        """Give them their names, durably, in the order in which they were created."""
        for file in self._files:
            file.publish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files:
            file.discard()


@contextmanager
def new_stream(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream to a new file that replaces ``path``, durably, after the block.

    On an error ``path`` is unchanged.

    Raises:
        DirectoryError: It cannot be written.
    """
    with NewFile(path) as file:
        with file.stream() as stream:
            yield stream
        file.publish()


def replace_files(folder: Path, write: Callable[[Path], object]) -> None:
    """Replace files in ``folder`` by those that a library writes, whatever has their names.

    Args:
        folder: The folder, which exists.
        write: Called with an empty folder, which nobody else can know; it writes the files there.
    """
    with named("Folder", folder), TemporaryDirectory(prefix=_MAKING, dir=folder) as scratch:
        write(Path(scratch))
        for file in sorted(path for path in Path(scratch).rglob("*") if path.is_file()):
            target = folder / file.relative_to(scratch)
            target.parent.mkdir(exist_ok=True)
            file.replace(target)  # a symbolic link of that name goes, and is not followed


def open_new(
    directory: Path, mode: int = 0o600, *, nameless: bool = True
) -> tuple[int, Path | None]:
    """Create a file in a directory; return its descriptor, and its name if it has one.

    Args:
        directory: The directory.
        mode: Its permissions, of which the umask takes some.
        nameless: Whether it has no name, if the filesystem can do that.
    """
    if nameless and Path("/proc/self/fd").is_dir():  # which gives it a name later
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode), None
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
    for left in directory.glob(f"{_MAKING}{RANDOM}"):  # by processes that were killed
        with suppress(OSError):
            if left.lstat().st_mtime < time.time() - _DAY:
                left.unlink()
    path = _random_name(directory)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode), path


def sync_directory(path: Path) -> None:
    """Return when the names in a directory are durable.

    Raises:
        DirectoryError: They cannot be made durable.
    """
    with named("A file that outlives a power loss in", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _random_name(directory: Path) -> Path:
    return directory / f"{_MAKING}{os.urandom(8).hex()}"
