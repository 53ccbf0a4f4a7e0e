"""Files that tensors are read from and written to asynchronously, by direct I/O."""

import errno as codes
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import torch

import tensorstow._native as _native
from tensorstow.base.directories import DirectoryFacts, check_directory, inspect_directory
from tensorstow.base.errors import (
    DirectoryError,
    DTypeError,
    OptionError,
    TransferError,
    advice_for,
    named,
)
from tensorstow.base.new_file import open_new
from tensorstow.base.regular_file import open_regular, regular_stream
from tensorstow.base.sizes import format_bytes

logger = logging.getLogger("tensorstow")

ALIGN = 4096
"""Direct files are written at multiples of this: the largest logical block of today's disks."""

GROWTH_BYTES = 16 << 20
"""Files grow by at least this much if there is room: fewer and longer extents on the disk."""

_COMPARED_BYTES = 1 << 17
_END_OF_FILE = -1  # csrc/io/transfer.h

_warned_buffered: set[int] = set()


class IoFuture:
    """One read or write under way. Its tensor's memory stays until it is over."""

    def __init__(self, ticket: _native.Ticket, file: "File", operation: str) -> None:
        """Wrap ``ticket``; made by File.read and File.write."""
        self._ticket = ticket
        self._file = file
        self._operation = operation

    def done(self) -> bool:
        """Return whether the transfer is over, well or not; never blocks."""
        return self._ticket.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the transfer is over.

        Raises TransferError if it failed, and TimeoutError after ``timeout`` seconds (the
        transfer then goes on).
        """
        if not self._ticket.wait(timeout):
            message = f"{self._operation} of {self._file.path} not over after {timeout} s."
            raise TimeoutError(message)
        code, offset, length = self._ticket.error()
        if code:
            raise transfer_error(self._file.path, self._operation, code, offset, length)


class File:
    """A file open for asynchronous reads and writes of tensors through one engine.

    ``direct``: whether it bypasses the page cache (O_DIRECT). Then the offset of a write must be a
    multiple of ALIGN. A tensor that is not aligned, or is read from an offset that is not, goes
    through aligned buffers of the engine.
    """

    def __init__(
        self, engine: _native.Engine, fd: int, path: Path, *, direct: bool, cached: bool = False
    ) -> None:
        """Take over the descriptor ``fd``; use ``scratch_file`` or ``create_file`` to make one.

        What goes through the page cache is dropped from it at once, unless ``cached``.
        """
        self.path = path
        self.direct = direct
        self.engine = engine
        self.fd = fd
        self._open = True
        self._owner = os.getpid()
        drop_cache = not direct and not cached
        if drop_cache:
            # Reading ahead would bring back what was just dropped.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.number = engine.add_file(fd, ALIGN if direct else 1, drop_cache=drop_cache)

    def read(self, tensor: torch.Tensor, offset: int) -> IoFuture:
        """Start filling the CPU tensor ``tensor`` from byte ``offset``."""
        return self._start("read", tensor, offset)

    def write(self, tensor: torch.Tensor, offset: int) -> IoFuture:
        """Start writing the CPU tensor ``tensor`` at byte ``offset``; leave it alone until done."""
        return self._start("write", tensor, offset)

    def reserve(self, nbytes: int) -> None:
        """Reserve space up to byte ``nbytes``; raise DirectoryError if there is too little."""
        reserve(self.fd, self.path.parent, nbytes)

    def close(self) -> None:
        """Wait for transfers in flight, then close the descriptor. Idempotent.

        In a forked child nothing of its own is in flight: only its copy of the descriptor goes.
        """
        if self._open:
            if self._owner == os.getpid():
                self.engine.drain()
            self._open = False
            os.close(self.fd)

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def _start(self, operation: str, tensor: torch.Tensor, offset: int) -> IoFuture:
        check_movable(tensor)
        if not self._open:
            message = f"{operation} of {self.path} was requested after it was closed."
            raise OptionError(message)
        if offset < 0 or (self.direct and operation == "write" and offset % ALIGN):
            message = (
                f"{operation} at offset {offset} of {self.path} was requested: a direct file"
                f" is written at multiples of {ALIGN}, and no file begins before 0."
            )
            raise OptionError(message)
        start = self.engine.read if operation == "read" else self.engine.write
        nbytes = tensor.numel() * tensor.element_size()
        # The storage is what keeps the bytes: a tensor's can be exchanged (`t.data = ...`).
        owner = tensor.untyped_storage()
        ticket = start(self.number, tensor.data_ptr(), nbytes, offset, owner)
        return IoFuture(ticket, self, operation)


def check_movable(tensor: torch.Tensor) -> None:
    """Raise DTypeError unless ``tensor`` is one run of bytes in host memory."""
    if tensor.device.type != "cpu":
        message = f"A tensor on {tensor.device} was asked to be moved: only CPU tensors can be."
        raise DTypeError(message)
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        message = "A tensor that is not contiguous was given: pass tensor.contiguous()."
        raise DTypeError(message)


def transfer_error(path: Path, operation: str, code: int, offset: int, length: int) -> OSError:
    """Return the exception for a transfer that failed with ``code`` in the native core."""
    errno = 0 if code == _END_OF_FILE else code
    return TransferError(path, operation, offset=offset, length=length, errno=errno)


def scratch_file(engine: _native.Engine, directory: Path, nbytes: int) -> File:
    """Make a file of ``nbytes`` in ``directory`` that has no name: nothing is left, ever.

    Space is reserved before anything is written. Raises DirectoryError if the directory is
    missing, read-only, in RAM or too full.
    """
    facts = check_directory(directory, nbytes)
    fd = open_unnamed(facts.path)
    try:
        with named("A scratch file in", facts.path):
            reserve(fd, facts.path, nbytes)
            direct = _go_direct(fd)
    except BaseException:
        os.close(fd)
        raise
    if not direct:
        _warn_buffered(facts)
    return File(engine, fd, facts.path / "(scratch, unlinked)", direct=direct)


def create_file(engine: _native.Engine, path: Path) -> File:
    """Make ``path`` an empty file for writes of any length at any offset, through the page cache.

    A file that was there loses its contents. Raises DirectoryError if it cannot be opened.
    """
    fd = open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    return File(engine, fd, path, direct=False, cached=True)


def open_to_write(path: Path, flags: int) -> int:
    """Return the descriptor of a regular file that a user names; raises DirectoryError."""
    try:
        # As open() does: the umask decides who may read it.
        return open_regular(path, flags)
    # An OSError too, with a message that says already what is wrong with the file.
    except DirectoryError:
        raise
    except OSError as error:
        advice = "Name a file in a directory that exists and this user may write to."
        message = f"File {path} was requested: {error.strerror}. {advice}"
        raise DirectoryError(message) from error


def open_file(engine: _native.Engine, path: Path, *, access: int = os.O_RDWR) -> File:
    """Open ``path`` past the page cache where that works, or raise DirectoryError.

    ``access``: ``os.O_RDONLY`` for a file that is only read.
    """
    with named("File", path):
        fd = open_regular(path, access)
        try:
            direct = _go_direct(fd, _reads_a_block)
        except BaseException:
            os.close(fd)
            raise
    if not direct:
        _warn_buffered(inspect_directory(path.parent))
    return File(engine, fd, path, direct=direct)


def reads_direct(path: Path) -> bool:
    """Return whether the file ``path`` can be read past the page cache."""
    with named("File", path), regular_stream(path) as file:
        return _go_direct(file.fileno(), _reads_a_block)


def compare_with_drive(path: Path, start: int) -> None:
    """Raise OSError unless the drive returns what the page cache has of ``path`` from ``start`` on.

    Nothing is compared where the filesystem refuses direct I/O.
    """
    try:
        direct = open_regular(path, os.O_RDONLY | os.O_DIRECT)
        try:
            different = _first_difference(path, direct, start // ALIGN * ALIGN)
        finally:
            os.close(direct)
    except OSError as error:
        if error.errno not in {codes.EINVAL, codes.EOPNOTSUPP}:
            raise
    else:
        if different is not None:
            raise OSError(codes.EIO, f"other bytes in the block at offset {different}")


def _first_difference(path: Path, direct: int, at: int) -> int | None:
    # Direct reads need aligned memory: a mapping begins at a page.
    with regular_stream(path) as cached, mmap.mmap(-1, _COMPARED_BYTES) as block:
        while wanted := os.pread(cached.fileno(), len(block), at):
            if os.preadv(direct, [block], at) != len(wanted) or block[: len(wanted)] != wanted:
                return at
            at += len(wanted)
    return None


def accepts_direct(directory: Path) -> bool:
    """Return whether files in ``directory`` can bypass the page cache."""
    try:
        fd = open_unnamed(directory)
    except DirectoryError as error:
        if _is_full(error.__cause__):
            return True  # nothing can be tried here: opening a file of a full disk tries it
        raise
    try:
        with named("A scratch file in", directory):
            os.ftruncate(fd, ALIGN)
            return _go_direct(fd)
    finally:
        os.close(fd)


def backend_for(directories: Iterable[Path], wanted: str | None = None) -> str | None:
    """Return the I/O backend for files in ``directories``: ``wanted``, None being the best one.

    Threads where a directory refuses direct I/O: through the page cache they are faster.
    """
    return wanted if all(accepts_direct(directory) for directory in directories) else "threads"


def wait_for_all(transfers: Iterable[IoFuture]) -> None:
    """Wait for every one of some transfers; raise the first error when all are over."""
    failure: OSError | None = None
    for transfer in transfers:
        try:
            transfer.wait()
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def open_unnamed(directory: Path) -> int:
    """Return the descriptor of a new file in ``directory`` that has no name."""
    with named("A scratch file in", directory):
        fd, path = open_new(directory)
        # A filesystem without O_TMPFILE gave it a name.
        if path is not None:
            os.unlink(path)
    return fd


def reserve(fd: int, directory: Path, nbytes: int) -> None:
    """Reserve space up to byte ``nbytes``; raise DirectoryError if there is too little."""
    # Where the filesystem cannot reserve, C libraries would write zeros: `fallocate` in Python is
    # posix_fallocate, so call it only where the kernel implements it.
    if nbytes == 0:
        return
    code = _native.fallocate(fd, nbytes)
    if code == 0:
        return
    if code in {codes.EOPNOTSUPP, codes.ENOSYS}:
        with named(f"{format_bytes(nbytes)} of space in", directory):
            os.ftruncate(fd, nbytes)
        return
    with named(f"{format_bytes(nbytes)} of space in", directory):
        free = os.statvfs(directory)
    message = (
        f"{format_bytes(nbytes)} of space were requested in {directory}:"
        f" {os.strerror(code)} ({format_bytes(free.f_bavail * free.f_frsize)} free)."
        f" {advice_for(code)}"
    )
    raise DirectoryError(message)


def grow(file: File, size: int, missing: int, growth: int) -> int:
    """Reserve ``missing`` bytes after byte ``size``, or ``growth`` if that is more and has room.

    Returns the new size; raises DirectoryError if the disk is too full.
    """
    wanted = size + max(missing, growth)
    try:
        file.reserve(wanted)
    except DirectoryError:
        wanted = size + missing
        file.reserve(wanted)
    return wanted


def _go_direct(fd: int, try_a_block: Callable[[int], bool] | None = None) -> bool:
    """Switch ``fd`` to O_DIRECT; return False where that does not work with ALIGN.

    Some filesystems take the flag and refuse the transfer, so a block is moved when there is one.
    """
    moves = try_a_block or _moves_a_block
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if _native.direct_alignment(fd) <= ALIGN and moves(fd):
            return True
    except OSError as error:
        if _is_full(error):
            return True  # direct I/O was taken, and no block is left to write
        if error.errno not in {codes.EINVAL, codes.EOPNOTSUPP}:
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return False


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in {codes.ENOSPC, codes.EDQUOT}


def _moves_a_block(fd: int) -> bool:
    if os.fstat(fd).st_size < ALIGN:
        return True  # an empty file has no block to try
    with mmap.mmap(-1, ALIGN) as block:
        # Only new files come here, so zeros are written over zeros.
        return os.pwritev(fd, [block], 0) == ALIGN and os.preadv(fd, [block], 0) == ALIGN


def _reads_a_block(fd: int) -> bool:
    with mmap.mmap(-1, ALIGN) as block:  # an empty file has no block to try
        return os.preadv(fd, [block], 0) in {0, ALIGN}


def _warn_buffered(facts: DirectoryFacts) -> None:
    device = os.stat(facts.path).st_dev
    if device not in _warned_buffered:
        _warned_buffered.add(device)
        logger.warning(
            "%s on %s (%s) refuses O_DIRECT: reads and writes go through the page cache, which is"
            " dropped after them; expect less speed",
            *(facts.path, facts.mount.device, facts.mount.filesystem),
        )
