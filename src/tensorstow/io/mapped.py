"""Files that are written in pieces and read as mapped memory.

[Note: Mapped files] They use the page cache: pieces begin at any byte, not at a block, and such a
file is mostly read soon after. Write-back starts every few MiB, and clean pages are dropped so that
the cache keeps its other contents. Pages of a mapping belong to the file: the system reclaims them
under memory pressure, and they do not count as the process's own.
"""

import ctypes
import errno as codes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from tensorstow.base.errors import TransferError, named
from tensorstow.base.new_file import NewFile
from tensorstow.base.regular_file import regular_stream
from tensorstow.base.sizes import round_up
from tensorstow.io.digest_list import DigestList, RunningDigest, digest_of_descriptor
from tensorstow.io.files import open_unnamed, reserve
from tensorstow.io.safetensors import Table

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_WINDOW = 32 << 20
"""Bytes after which write-back is started."""


class PieceFile:
    """A file under construction."""

    def __init__(
        self, fd: int, path: Path, nbytes: int, running: RunningDigest | None = None
    ) -> None:
        """Take over the descriptor ``fd`` and reserve its bytes; raise DirectoryError if full."""
        self.path = path
        self._running = running
        self.nbytes = nbytes
        self._fd = fd
        self._open = True
        self._ahead = 0
        with self._closed_on_error():
            reserve(fd, path.parent, nbytes)

    def write(self, values: torch.Tensor, offset: int) -> None:
        """Write a tensor in host memory at byte ``offset``; raise TransferError if it fails."""
        # As bytes: NumPy has no bfloat16.
        view = values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(view):
            # The system may write less than it is given.
            done += self._write_some(view[done:], offset + done)
        if self._running is not None:
            self._running.add(view, offset)
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

    def close(self) -> None:
        """Close the descriptor; mappings stay. Idempotent."""
        if self._open:
            self._open = False
            os.close(self._fd)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

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
        with named("File", path), regular_stream(path) as file:
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


def drop_pages(mapped: torch.Tensor) -> None:
    """Let the memory of a tensor over a mapped file go, which reads the file again when it is used.

    It is contiguous. What was written to a private mapping is lost.
    """
    # Whole pages only: neighbours in the first and the last one may have been written to.
    begin = round_up(mapped.data_ptr(), mmap.PAGESIZE)
    end = (mapped.data_ptr() + mapped.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:  # an error leaves the memory where it is
        _libc.madvise(begin, end - begin, mmap.MADV_DONTNEED)


class NewSafetensors(PieceFile):
    """A new safetensors file, whose tensors are written by name, whole or in pieces.

    Close it before the file is published. With ``running`` the digest of the file is taken, and
    the pieces come in the order of the table.
    """

    def __init__(self, file: NewFile, table: Table, running: RunningDigest | None = None) -> None:
        """Reserve the bytes of the whole file, and write its table."""
        self._table = table
        # A copy of the descriptor: this file closes its own, and ``seal`` needs the other.
        super().__init__(os.dup(file.fd), file.path, table.nbytes, running)
        with self._closed_on_error():
            self.write(torch.frombuffer(bytearray(table.header), dtype=torch.uint8), 0)

    def put(self, name: str, values: torch.Tensor, start: int = 0) -> None:
        """Write ``values`` as the elements of a tensor from ``start`` on."""
        entry = self._table.entries[name]
        self.write(values, entry.offset + start * entry.dtype.itemsize)


@contextmanager
def new_safetensors(path: Path, table: Table, listed: DigestList) -> Iterator[NewSafetensors]:
    """Yield a new file that replaces ``path``, durably, when the block ends without error.

    Its digest is noted in ``listed``, and an older list removed: write the new one after the last
    file. The file is read once for that, because tensors may be written in any order.
    """
    with NewFile(path) as new_file:
        with NewSafetensors(new_file, table) as file:
            yield file
        with named("File", path):
            listed.note(path, digest_of_descriptor(new_file.fd))
        new_file.seal()
        # Before the file has its name: an older list would call it damaged.
        listed.remove()
        new_file.publish()
