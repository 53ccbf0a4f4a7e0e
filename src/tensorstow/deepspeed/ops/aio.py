"""``deepspeed.ops.aio``: upstream's reads and writes of files, over this package's I/O."""

import os
import weakref
from fcntl import F_GETFL, fcntl
from pathlib import Path
from types import SimpleNamespace

import torch

from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.base.sizes import round_up
from tensorstow.io.engine import open_engine
from tensorstow.io.files import ALIGN, File, IoFuture, open_file, open_to_write

_LOCKED: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Memory that ``new_cpu_locked_tensor`` has made, of all handles."""


class AioHandle:
    """Reads and writes tensors in host memory, by name of a file; ``wait`` ends what is under way.

    A transfer that fails raises ``TransferError`` with its place, where upstream returns -1.

    Args:
        block_size: The bytes that a transfer is cut into, rounded up to a multiple of 4096.
        queue_depth: Blocks in flight.
        single_submit: No effect: what is ready is submitted together.
        overlap_events: No effect: submitting and completing overlap.
        intra_op_parallelism: No effect: one thread keeps all blocks in flight.

    Raises:
        OptionError: A value that cannot be used.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        whole = round_up(block_size, ALIGN)
        self._engine = open_engine(depth=queue_depth, block_bytes=whole, said_by="queue_depth")
        self._block_size, self._queue_depth = block_size, queue_depth
        self._flags = single_submit, overlap_events
        self._parallelism = intra_op_parallelism
        self._pending: list[tuple[IoFuture, File]] = []

    def get_block_size(self) -> int:
        """Return the bytes that a transfer is cut into."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Return how many blocks are in flight."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Return what was given."""
        return self._flags[0]

    def get_overlap_events(self) -> bool:
        """Return what was given."""
        return self._flags[1]

    def get_intra_op_parallelism(self) -> int:
        """Return what was given."""
        return self._parallelism

    def get_alignment(self) -> int:
        """Return of what number of bytes a length must be a multiple: of any."""
        return 1

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill a contiguous tensor from a file, and return what ``wait`` does."""
        self._start("read", buffer, filename, file_offset)
        return self.wait()

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Write a contiguous tensor to a file, and return what ``wait`` does.

        The file is made if it is not there, and keeps its other bytes.
        """
        self._start("write", buffer, filename, file_offset)
        return self.wait()

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start filling a contiguous tensor, which is used until ``wait``; return 0."""
        self._start("read", buffer, filename, file_offset)
        return 0

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | int | None = None,
        file_offset: int = 0,
        fd: int | None = None,
    ) -> int:
        """Start writing a contiguous tensor, which must not change until ``wait``; return 0.

        A number in place of the file's name, or ``fd``, is a descriptor that may be written to; it
        may be closed before ``wait``. Raises OptionError for both a name and a descriptor, or
        neither.
        """
        targets = [place for place in (filename, fd) if place is not None]
        if len(targets) != 1:
            message = f"filename={filename!r} and fd={fd!r} were given: pass exactly one."
            raise OptionError(message)
        self._start("write", buffer, targets[0], file_offset)
        return 0

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool,
        async_op: bool,
        file_offset: int = 0,
    ) -> int:
        """Read as ``async_pread`` or ``sync_pread``; results are checked in any case."""
        del validate
        read = self.async_pread if async_op else self.sync_pread
        return read(buffer, filename, file_offset)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool,
        async_op: bool,
        file_offset: int = 0,
    ) -> int:
        """Write as ``async_pwrite`` or ``sync_pwrite``; results are checked in any case."""
        del validate
        write = self.async_pwrite if async_op else self.sync_pwrite
        return write(buffer, filename, file_offset)

    def wait(self) -> int:
        """Wait for all that is under way, close its files, and return the number of transfers.

        Raises TransferError if one has failed; all have ended.
        """
        count = len(self._pending)
        failed: list[OSError] = []
        while self._pending:
            future, file = self._pending[0]
            try:
                future.wait()
            except OSError as error:
                failed.append(error)
            file.close()
            del self._pending[0]  # an interrupt in the wait leaves it to the next one
        if failed:
            raise failed[0]
        return count

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return zeros in host memory, pinned if an accelerator is present."""
        pin = torch.accelerator.is_available()
        tensor = torch.zeros(num_elem, dtype=example_tensor.dtype, device="cpu", pin_memory=pin)
        _LOCKED.add(tensor.untyped_storage())
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether ``new_cpu_locked_tensor`` created a tensor, at the first call with it."""
        storage = tensor.untyped_storage()
        is_known = storage in _LOCKED
        _LOCKED.discard(storage)
        return is_known

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is one of ``new_cpu_locked_tensor``, of any handle, or a part.

        It is also for one that torch has pinned.
        """
        return tensor.untyped_storage() in _LOCKED or tensor.is_pinned()

    def _start(self, operation: str, buffer: torch.Tensor, name: str | int, offset: int) -> None:
        if not buffer.is_contiguous():
            message = f"A buffer of strides {buffer.stride()} was given: it must be contiguous."
            raise OptionError(message)
        whole = not (offset % ALIGN or buffer.nbytes % ALIGN)
        if isinstance(name, int):
            file = self._of_descriptor(name, whole=whole)
        elif operation == "read":
            file = open_file(self._engine, Path(name), access=os.O_RDONLY)
        else:
            file = self._open_to_write(Path(name), direct=whole)
        try:
            future = (file.read if operation == "read" else file.write)(buffer, offset)
        except BaseException:
            file.close()
            raise
        self._pending.append((future, file))

    def _of_descriptor(self, fd: int, *, whole: bool) -> File:
        """Return the file of a descriptor; raises DirectoryError.

        Direct writes are of whole blocks of the file: a part of one goes through the page cache, by
        a descriptor of its own, as flags are those of all copies of one.
        """
        path = Path(f"/dev/fd/{fd}")
        flags = fcntl(fd, F_GETFL)
        if whole or not flags & os.O_DIRECT:
            direct = bool(flags & os.O_DIRECT)
            return File(self._engine, os.dup(fd), path, direct=direct, cached=True)
        try:
            opened = os.open(path, (flags & os.O_ACCMODE) | os.O_CLOEXEC)
        except OSError as error:
            message = (
                f"A part of a block of {ALIGN} bytes was to be written to the descriptor {fd},"
                f" which has O_DIRECT, and the file cannot be opened again: {error.strerror}. Give"
                " its name, or a descriptor without O_DIRECT."
            )
            raise DirectoryError(message) from error
        return File(self._engine, opened, path, direct=False, cached=True)

    def _open_to_write(self, path: Path, *, direct: bool) -> File:
        """Open a file, and make it if need be; raises DirectoryError."""
        fd = open_to_write(path, os.O_RDWR | os.O_CREAT)
        if not direct:
            return File(self._engine, fd, path, direct=False, cached=True)
        # The file exists now, and is opened again past the page cache, where that works.
        os.close(fd)
        return open_file(self._engine, path)


class AsyncIOBuilder:
    """Where scripts look for ``aio_handle``."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True: files can be read and written on every machine."""
        del verbose
        return True

    def load(self, verbose: bool = True) -> SimpleNamespace:
        """Return an object with ``aio_handle``."""
        del verbose
        return SimpleNamespace(aio_handle=AioHandle)
