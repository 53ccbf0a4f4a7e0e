"""``DiskOffloader``: writes tensors to disk, frees their memory, and reads them back."""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from tensorstow.base.directories import make_directories, read_paths
from tensorstow.base.keywords import names_keywords
from tensorstow.doorkit.keyword_table import Table, describes, honoured
from tensorstow.io.engine import BackendChoice, open_engine
from tensorstow.io.files import ALIGN, accepts_direct
from tensorstow.io.scratch import ScratchFiles
from tensorstow.memory.moving_bytes import ByteState
from tensorstow.tensornvme.backends import choose_tensornvme_backend
from tensorstow.tensornvme.offload_table import Callback, OffloadError, OffloadTable

logger = logging.getLogger("tensorstow")

Directory = str | os.PathLike[str]

_WRITES: Table = {
    "tensor": honoured("A contiguous CPU tensor that has its storage for itself."),
    "tensors": honoured("Contiguous CPU tensors that have their storages for themselves."),
    "callback": honoured("Is called without arguments after the write."),
}
_READS: Table = {
    "tensor": honoured("A tensor that was written."),
    "tensors": honoured("The tensors, in the order in which they were written."),
    "callback": honoured("Is called without arguments after the read."),
}


@names_keywords
class DiskOffloader:
    """Write tensors to disk and free their memory; read them back into the same tensors.

    After a write the tensor's storage has no bytes; a read allocates new ones. Calls on one tensor
    take effect in the order in which they are made. Tensors written in one call (``writev``) are
    read in one call, in the same order.

    ``async_*`` calls return at once. Do not use their tensors until ``sync_write_events``,
    ``sync_read_events`` or ``synchronize`` returned: these wait, free memory, run callbacks, and
    raise errors. After a failed write the tensor still has its memory; after a failed read it is
    still on disk. Callbacks run on the calling thread, in the next call at the latest. Use it from
    one thread at a time.

    The files have no name and bypass the page cache if the filesystem supports that. When the
    offloader is closed or dropped, tensors on disk are lost.

    Args:
        dir_name: A directory, or several to stripe over. They are created if they are missing.
        n_entries: Blocks of 1 MiB in flight. Default: 16.
        backend: TensorNVMe's name of a backend: "uring", "aio" or "pthread".

    Raises:
        DirectoryError: A directory that is read-only, too full or in RAM.
        OptionError: The backend is unknown, or no directory was named.
    """

    def __init__(
        self, dir_name: Directory | Sequence[Directory], n_entries: int = 16, backend: str = "uring"
    ) -> None:
        directories = [f.path for f in make_directories(read_paths(dir_name, "dir_name"))]
        self.backend: BackendChoice = _choose(backend, directories)
        """The backend in use, and why others were refused."""
        engine = open_engine(self.backend.name, depth=n_entries, said_by="n_entries")
        count = len(directories)
        # One block each, so that direct I/O can be tried.
        self._table = OffloadTable(ScratchFiles([engine] * count, directories, [ALIGN] * count))

    @describes(_WRITES)
    def async_write(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Start writing a tensor; its memory is freed when the write is done.

        Raises:
            OffloadError: The tensor cannot be written, or is on disk.
            DirectoryError: The disk is full.
        """
        self._table.write((tensor,), callback)

    @describes(_READS)
    def async_read(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Allocate a tensor's memory and start reading it back.

        Raises:
            OffloadError: The tensor is not on disk.
        """
        self._table.read((tensor,), callback)

    @describes(_WRITES)
    def sync_write(self, tensor: torch.Tensor) -> None:
        """Write a tensor and free its memory.

        Raises:
            OffloadError: The tensor cannot be written, or is on disk.
            TransferError: The write failed; the tensor still has its memory.
        """
        self._table.wait_for(self._table.write((tensor,), None))

    @describes(_READS)
    def sync_read(self, tensor: torch.Tensor) -> None:
        """Allocate a tensor's memory and read it back.

        Raises:
            OffloadError: The tensor is not on disk.
            TransferError: The read failed; the tensor is still on disk.
        """
        self._table.wait_for(self._table.read((tensor,), None))

    @describes(_WRITES)
    def async_writev(
        self, tensors: Sequence[torch.Tensor], callback: Callback | None = None
    ) -> None:
        """Start writing tensors as one; they can only be read back together, in this order."""
        self._table.write(_as_tuple(tensors), callback)

    @describes(_READS)
    def async_readv(
        self, tensors: Sequence[torch.Tensor], callback: Callback | None = None
    ) -> None:
        """Start reading back tensors that were written in one call."""
        self._table.read(_as_tuple(tensors), callback)

    @describes(_WRITES)
    def sync_writev(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors as one; they can only be read back together, in this order."""
        self._table.wait_for(self._table.write(_as_tuple(tensors), None))

    @describes(_READS)
    def sync_readv(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read back tensors that were written in one call."""
        self._table.wait_for(self._table.read(_as_tuple(tensors), None))

    def sync_write_events(self) -> None:
        """Wait until all writes are done; raises the first error."""
        self._table.wait_for_all({ByteState.WRITING})

    def sync_read_events(self) -> None:
        """Wait until all reads are done; raises the first error."""
        self._table.wait_for_all({ByteState.READING})

    def synchronize(self) -> None:
        """Wait until all writes and reads are done; raises the first error."""
        self._table.wait_for_all({ByteState.WRITING, ByteState.READING})

    def close(self) -> None:
        """Finish all reads, abandon all writes, and drop the files. Idempotent.

        A tensor whose write is abandoned keeps its memory. Tensors on disk are lost.
        """
        self._table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Close; errors are logged, and no callback is run."""
        table: OffloadTable | None = getattr(self, "_table", None)
        if table is None:  # __init__ has failed
            return
        failures, lost = table.shut()
        for failure in failures:
            logger.error("A DiskOffloader was dropped after a failure: %s", failure)
        if lost and not sys.is_finalizing():
            logger.warning("%d tensors were on disk when their DiskOffloader was dropped", lost)


def _choose(backend: str, directories: Sequence[Path]) -> BackendChoice:
    choice = choose_tensornvme_backend(backend)
    if choice.name == "threads" or all(accepts_direct(d) for d in directories):
        return choice
    reason = "a directory refuses O_DIRECT, and threads are faster through the page cache"
    return BackendChoice("threads", (*choice.refused, (choice.name, reason)))


def _as_tuple(tensors: Sequence[torch.Tensor] | torch.Tensor) -> tuple[torch.Tensor, ...]:
    if isinstance(tensors, torch.Tensor):
        message = "A list of tensors was requested and one tensor was given. Put it into a list."
        raise OffloadError(message)
    return tuple(tensors)
