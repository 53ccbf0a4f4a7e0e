"""``tensornvme.async_file_io``: ``AsyncFileWriter``, which writes a file in the background."""

import ctypes
import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import torch

from tensorstow.base.errors import DTypeError, OptionError, StowError
from tensorstow.base.fields import read_value, whole_number
from tensorstow.base.health import Health
from tensorstow.base.keywords import names_keywords
from tensorstow.io.engine import BackendChoice, open_engine
from tensorstow.io.files import File, IoFuture, create_file, transfer_error
from tensorstow.tensornvme.backends import choose_tensornvme_backend

logger = logging.getLogger("tensorstow")
_FORKED = (
    "A writer was used in a forked process: its threads and file belong to the parent. Create"
    " another in this process."
)
_FAILED = "A write was requested, but an earlier one failed: {}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """One write in flight, and the object that keeps its bytes alive."""

    future: IoFuture
    owner: object
    is_borrowed: bool
    """The bytes belong to a tensor of the caller, who must not change it yet."""


@names_keywords
class AsyncFileWriter:
    """Write bytes and tensors to a file in the background, one after the other.

    An existing file is replaced. Each write returns at once. ``synchronize`` waits until the system
    has all bytes, and raises errors; ``close``, which ends a ``with`` block, also makes them
    durable. A writer that is garbage collected closes itself, and logs errors. After an error the
    file has a hole, so further writes raise an error.

    Args:
        path: The file.
        n_entries: Blocks of 1 MiB in flight. Default: 16.
        backend: TensorNVMe's name of a backend: "uring", "aio" or "pthread". Default: None, the
            best one.
        n_tasks: As in ``register_tasks``.

    Raises:
        DirectoryError: The file cannot be created.
        OptionError: The backend is unknown, or a number is negative.
    """

    _file: File | None = None  # also until all of __init__ has succeeded

    def __init__(
        self,
        path: str | os.PathLike[str],
        n_entries: int = 16,
        backend: str | None = None,
        n_tasks: int = 0,
    ) -> None:
        _count("n_tasks", n_tasks)
        self.backend: BackendChoice = choose_tensornvme_backend(backend)
        """The backend in use, and why others were refused."""
        self.offset = 0
        """Offset of the next write, in bytes."""
        self._pieces: deque[_Piece] = deque()
        self._awaited = 0
        self._health = Health(_FORKED, _FAILED)
        engine = open_engine(self.backend.name, depth=n_entries, said_by="n_entries")
        self._file = create_file(engine, Path(path))

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write bytes after the previous write.

        Args:
            data: The bytes. A bytearray or memoryview is copied, ``bytes`` are not.

        Returns:
            The number of bytes.
        """
        fixed = bytes(data)
        address = np.frombuffer(fixed, np.uint8).ctypes.data if fixed else 0
        self._start(fixed, address, len(fixed), self.offset)
        return len(fixed)

    def write_raw(self, py_ref: object, buffer: int, n_bytes: int, offset: int) -> None:
        """Write bytes at an address to an offset; the next write goes after them.

        Args:
            py_ref: An object that keeps the memory alive.
            buffer: The address. Do not change the bytes before ``sync_before_step``.
            n_bytes: The number of bytes.
            offset: The offset in the file, in bytes.

        Raises:
            OptionError: A negative number.
        """
        if n_bytes < 0 or offset < 0:
            message = f"A write of {n_bytes} bytes at {offset} was requested: both are 0 or more."
            raise OptionError(message)
        self._start(py_ref, buffer, n_bytes, offset, is_borrowed=True)

    def write_tensor(self, tensor: torch.Tensor, pinned: torch.Tensor | None = None) -> None:
        """Write the bytes of a tensor, in row-major order.

        A tensor on an accelerator is copied to the host before this returns, and so is a CPU tensor
        if ``pinned`` is given.

        Args:
            tensor: The tensor. Do not change a CPU tensor that is not copied before
                ``sync_before_step``.
            pinned: A contiguous CPU tensor of the same dtype and number of elements to copy into.
                Do not change it before ``synchronize``. Default: None, memory is allocated if a
                copy is needed.

        Raises:
            DTypeError: ``pinned`` does not fit.
        """
        source = tensor.detach().resolve_conj().resolve_neg()
        if pinned is not None:
            host = _filled(pinned, source)
        elif source.device.type != "cpu":
            host = source.cpu().contiguous()
        else:
            host = source.contiguous()
        borrowed = pinned is None and host.data_ptr() == tensor.data_ptr()
        self._start(host, host.data_ptr(), host.nbytes, self.offset, is_borrowed=borrowed)
        self._awaited -= 1

    def register_h2d(self, num_tensors: int) -> None:
        """Announce how many calls of ``write_tensor`` come before ``sync_before_step``.

        Args:
            num_tensors: The number of calls.

        Raises:
            OptionError: A negative number.
        """
        self._awaited = _count("num_tensors", num_tensors)

    def sync_before_step(self) -> None:
        """Wait until no tensor passed so far is read any more: then they may be changed.

        Raises:
            OptionError: ``register_h2d`` announced more tensors.
            TransferError: A write failed.
        """
        if self._awaited > 0:
            message = (
                f"{self._awaited} of the tensors that register_h2d announced were not written yet."
                " Call write_tensor for each before sync_before_step."
            )
            raise OptionError(message)
        self._awaited = 0
        last = max((i for i, p in enumerate(self._pieces) if p.is_borrowed), default=-1)
        self._wait(last + 1)

    def register_tasks(self, num_tasks: int) -> None:
        """Check the number and do nothing else: ``synchronize`` waits for all writes.

        Args:
            num_tasks: The number of writes.

        Raises:
            OptionError: A negative number.
        """
        _count("num_tasks", num_tasks)

    def flush(self) -> None:
        """Do nothing: no write is held back. ``synchronize`` waits for them."""

    def synchronize(self) -> None:
        """Wait until the system has all bytes; raises the first error."""
        self._wait(len(self._pieces))

    def close(self) -> None:
        """Wait, make the file durable and close it. Idempotent.

        In a forked child only its copy of the descriptor is closed.

        Raises:
            TransferError: A write failed that was not reported yet.
        """
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if self._health.is_ours and self._health.failure is None:
                self._wait(len(self._pieces))
                _make_durable(file)
        finally:
            file.close()
            self._pieces.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Close; errors are logged."""
        try:
            self.close()
        except StowError as error:
            logger.error("An AsyncFileWriter was dropped after a failure: %s", error)  # noqa: TRY400

    def _start(
        self, owner: object, address: int, nbytes: int, offset: int, *, is_borrowed: bool = False
    ) -> None:
        if self._file is None:
            message = "A write was requested after the file was closed. Make another writer."
            raise OptionError(message)
        while self._pieces and self._pieces[0].future.done():
            self._wait(1)
        self._health.check()
        if nbytes:
            buffer = (ctypes.c_char * nbytes).from_address(address)
            buffer.owner = owner  # type: ignore[attr-defined]  # lives as long as the write
            memory = torch.frombuffer(buffer, dtype=torch.uint8)
            future = self._file.write(memory, offset)
            self._pieces.append(_Piece(future, owner, is_borrowed))
        # A piece that fills a gap does not move the end back.
        self.offset = max(self.offset, offset + nbytes)

    def _wait(self, count: int) -> None:
        """Wait for the first ``count`` writes; raise the first error once all are done."""
        failure = None
        for _ in range(count):
            try:
                self._pieces[0].future.wait()
            except StowError as error:
                failure = failure or error
            self._pieces.popleft()
        if failure is not None:
            self._health.poison(failure)
            raise failure


def _filled(pinned: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    fits = pinned.dtype == source.dtype and pinned.numel() == source.numel()
    if not fits or pinned.device.type != "cpu" or not pinned.is_contiguous():
        message = (
            f"pinned has {pinned.numel()} elements of {pinned.dtype} on {pinned.device}. Give a"
            f" contiguous CPU tensor of {source.numel()} elements of {source.dtype}."
        )
        raise DTypeError(message)
    destination = pinned.detach()  # keeps its memory if pinned.data is replaced
    destination.view(-1).copy_(source.reshape(-1))
    return destination


def _make_durable(file: File) -> None:
    try:
        os.fsync(file.fd)
        directory = os.open(file.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)  # the name is a change to the directory
        finally:
            os.close(directory)
    except OSError as error:
        raise transfer_error(file.path, "fsync", error.errno or 0, 0, 0) from error


def _count(name: str, value: object) -> int:
    count: int = read_value(Annotated[int, whole_number(0)], value, name)
    return count
