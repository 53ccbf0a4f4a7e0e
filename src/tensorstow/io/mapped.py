"""Files that are written in pieces and read as mapped memory.

[Note: Mapped files] They use the page cache: pieces begin at any byte, not at a block, and such a
file is mostly read soon after. Write-back starts every few MiB, and clean pages are dropped so that
the cache keeps its other contents. Pages of a mapping belong to the file: the system reclaims them
under memory pressure, and they do not count as the process's own.
"""

import errno as codes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import torch

from tensorstow.base.errors import DirectoryError, TransferError, named
from tensorstow.io.files import open_unnamed, reserve

ALIGN = 64
"""Tensors in memory begin at multiples of this, as torch's own do."""
_WINDOW = 32 << 20
"""Bytes after which write-back is started."""


class PieceFile:
    """A file under construction."""

    def __init__(self, fd: int, path: Path, nbytes: int) -> None:
        """Take over the descriptor ``fd`` and reserve ``nbytes``; raise DirectoryError if full."""
        self.path = path
        self.nbytes = nbytes
        self._fd = fd
        self._open = True
        self._ahead = 0
        try:
            reserve(fd, path.parent, nbytes)
        except BaseException:
            self.close()
            raise

    def write(self, values: torch.Tensor, offset: int) -> None:
        """Write a tensor in host memory at byte ``offset``; raise TransferError where it fails."""
        view = values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(view):
            done += self._write_some(view[done:], offset + done)
        self._ahead += done
        if self._ahead >= _WINDOW:
            # Starts the writing of what is dirty, without waiting, and drops what is clean.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._ahead = 0

    def _write_some(self, view: memoryview, offset: int) -> int:
        code = codes.EIO  # for a write that moves nothing and says nothing
        try:
            moved = os.pwrite(self._fd, view, offset)
        except OSError as error:
            code = error.errno or code
            moved = 0
        if moved == 0:
            raise TransferError(self.path, "write", offset=offset, length=len(view), errno=code)
        return moved

    def map(self) -> "Mapped":
        """Map the file to memory; writes to the memory go to the file."""
        return Mapped(self._fd, self.nbytes, mmap.ACCESS_WRITE)

    def sync(self) -> None:
        """Return when the file is durable; raise TransferError if the disk fails."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            code = error.errno or codes.EIO
            raise TransferError(
                self.path, "fsync", offset=0, length=self.nbytes, errno=code
            ) from error

    def close(self) -> None:
        """Close the descriptor; mappings stay. Idempotent."""
        if self._open:
            self._open = False
            os.close(self._fd)

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()


class Mapped:
    """A file's bytes as tensors, which keep the mapping alive; a file without a name ends with it.

    [Note: Mapped files] above.
    """

    def __init__(self, fd: int, nbytes: int, access: int) -> None:
        """Map the first ``nbytes`` of ``fd``, which may be closed afterwards."""
        self._map = mmap.mmap(fd, nbytes, access=access) if nbytes else None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Map an existing file; writes to the memory are private to this process."""
        with named("File", path), path.open("rb") as file:
            return cls(file.fileno(), os.fstat(file.fileno()).st_size, mmap.ACCESS_COPY)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor whose bytes begin at ``offset``; no byte is read."""
        count = torch.Size(shape).numel()
        if self._map is None or count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))


def scratch_pieces(directory: Path, nbytes: int) -> PieceFile:
    """Return a new file of ``nbytes`` in ``directory`` that has no name: nothing is left, ever."""
    return PieceFile(open_unnamed(directory), directory / "(scratch, unlinked)", nbytes)


@contextmanager
def replacing(path: Path, nbytes: int) -> Iterator[PieceFile]:
    """Yield a new file that replaces ``path``, durably, when the block ends without error.

    On an error ``path`` is unchanged.
    """
    made = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        # As open() does: the umask decides who may read it.
        fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _cannot_make(path, error) from error
    try:
        with PieceFile(fd, made, nbytes) as file:
            yield file
            file.sync()
        rename_over(made, path)
    except BaseException:
        with suppress(FileNotFoundError):
            made.unlink()
        raise
    sync_directory(path.parent)


def rename_over(made: Path, path: Path) -> None:
    """Give a file the name ``path``, whatever has it; raise DirectoryError where it cannot."""
    try:
        os.replace(made, path)
    except OSError as error:
        raise _cannot_make(path, error) from error


def _cannot_make(path: Path, error: OSError) -> DirectoryError:
    message = (
        f"File {path} was requested: {error.strerror}. Name a file in a directory that exists and"
        " this user may write to."
    )
    return DirectoryError(message)


def sync_directory(path: Path) -> None:
    """Return when the names in a directory are durable; raise DirectoryError where they cannot."""
    with named("A file that outlives a power loss in", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
