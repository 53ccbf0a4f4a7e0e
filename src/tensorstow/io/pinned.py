"""Pinned host memory: registered with the driver, or from torch's allocator."""

import logging
import os
import resource
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensorstow.base.sizes import format_bytes, parse_size
from tensorstow.io.arena import Arena

logger = logging.getLogger("tensorstow")

LIMIT = "TENSORSTOW_PINNED_LIMIT"
"""Environment: the bytes that a process may pin, a size; unset: as many as the driver lets it."""
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


@dataclass(eq=False, slots=True)
class _Memory:
    """What a block frees at its end."""

    bytes: torch.Tensor
    device: torch.device
    pinned_bytes: int = 0
    is_registered: bool = False
    owner: int = 0
    """The process that has the mapping and the driver; a forked child has neither."""


class PinnedBlock:
    """``nbytes`` of host memory, zero-filled, for asynchronous copies from and to ``device``.

    If torch's module of the device has ``cudart()`` (CUDA and ROCm) an arena of just that size
    is registered with the driver; on other accelerators torch's pinned allocator gives the memory,
    and may round it to a power of two. If neither can, or ``TENSORSTOW_PINNED_LIMIT`` would be
    passed, the memory is pageable, ``pinned`` is False and a warning is logged, once: copies then
    block their caller. For the CPU it is an arena as it is.
    """

    def __init__(self, nbytes: int, device: torch.device, synchronize: Callable[[], None]) -> None:
        """Allocate; ``synchronize`` is called before the memory is freed, and waits for copies.

        Raises BudgetError if the system has no room.
        """
        self.nbytes = nbytes
        refused = None
        if nbytes and device.type != "cpu":
            memory, refused = _pinned(nbytes, device)
        else:
            memory = _Memory(_pageable(nbytes), device)
        if refused is not None:
            _warn(nbytes, device, refused)
        self.pinned = refused is None
        self.pinned_bytes = memory.pinned_bytes
        """What of it is pinned for an accelerator."""
        self._bytes = memory.bytes
        memory.owner = os.getpid()
        # A finalizer keeps its arguments alive: they are the memory, and not the block.
        weakref.finalize(self, _release, synchronize, memory)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D view of ``count`` elements from byte ``offset``, a multiple of theirs."""
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)


HostMemory = Arena | PinnedBlock
"""Bytes in host memory, pinned or not."""


def pinned_bytes() -> int:
    """Return the bytes that this process has pinned through blocks."""
    return _ledger.nbytes


class _Ledger:
    """Counts pinned bytes against the limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0

    def add(self, nbytes: int) -> str | None:
        """Count ``nbytes`` more, or return why they are not to be pinned."""
        text = os.environ.get(LIMIT)
        limit = None if not text else parse_size(text, LIMIT)
        with self._lock:
            if limit is not None and self.nbytes + nbytes > limit:
                return f"{LIMIT} is {text}, of which {format_bytes(self.nbytes)} are pinned"
            self.nbytes += nbytes
            return None

    def remove(self, nbytes: int) -> None:
        """Count ``nbytes`` no more."""
        # Called by finalizers, which the collector runs inside of ``add`` too: no lock is taken.
        self.nbytes -= nbytes


_ledger = _Ledger()


def _pageable(nbytes: int) -> torch.Tensor:
    return Arena(nbytes, in_children=False).tensor(0, nbytes, torch.uint8)


def _pinned(nbytes: int, device: torch.device) -> tuple[_Memory, str | None]:
    """Return memory and None, or pageable memory and why it is not pinned."""
    runtime = _runtime(device)
    # torch's allocator rounds to a power of two. Counted before the memory exists, so that threads
    # do not pass the limit together.
    counted = nbytes if runtime is not None else 1 << (nbytes - 1).bit_length()
    refused = _ledger.add(counted)
    if refused is not None:
        return _Memory(_pageable(nbytes), device), refused
    try:
        memory, refused = _pinned_by(runtime, nbytes, device)
    except BaseException:
        _ledger.remove(counted)  # there is no memory to count
        raise
    if refused is None:
        memory.pinned_bytes = counted
    else:
        _ledger.remove(counted)
    return memory, refused


def _pinned_by(
    runtime: object | None, nbytes: int, device: torch.device
) -> tuple[_Memory, str | None]:
    """Allocate like ``_pinned``, by the driver or torch's allocator, without counting."""
    if runtime is not None:
        memory = _Memory(_pageable(nbytes), device)
        refused = register(memory.bytes.data_ptr(), nbytes, device)
        memory.is_registered = refused is None
        return memory, refused
    pinned = _from_torch(nbytes)
    if pinned is not None:
        return _Memory(pinned, device), None
    return _Memory(_pageable(nbytes), device), "torch's allocator of pinned memory gave none"


def register(address: int, nbytes: int, device: torch.device) -> str | None:
    """Pin memory for a device whose module has ``cudart()``; return why the driver did not."""
    runtime = _runtime(device)
    error = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
    if not error:
        return None
    # The driver would report the error at the next call, which may be an unrelated kernel.
    try:
        torch.empty(1, device=device).zero_()
    except RuntimeError:
        logger.debug("the driver's error of cudaHostRegister was taken back")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "none" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    return f"the driver's error is {error}, the limit of locked memory {locked}"


def unregister(address: int, device: torch.device) -> None:
    """Unpin memory that ``register`` pinned; no copy may use it any more."""
    _runtime(device).cudaHostUnregister(address)


def _runtime(device: torch.device) -> Any:  # noqa: ANN401  # a compiled module that has no types
    """Return the runtime that registers host memory for ``device``; None: there is none."""
    cudart = getattr(torch.get_device_module(device), "cudart", None)
    return None if cudart is None else cudart()


def _from_torch(nbytes: int) -> torch.Tensor | None:
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return None


_warned: set[str] = set()


def _warn(nbytes: int, device: torch.device, refused: str) -> None:
    if device.type in _warned:
        return
    _warned.add(device.type)
    logger.warning(
        "%s of host memory could not be pinned for %s (%s): copies are slower and hold training"
        " up. Raise that limit (locked memory by `ulimit -l`, in containers --ulimit memlock=-1)"
        " or keep less on the host.",
        format_bytes(nbytes),
        device.type,
        refused,
    )


def _release(synchronize: Callable[[], None], memory: _Memory) -> None:
    """Free ``memory`` when no copy uses it; it is an argument to keep it alive until then."""
    if memory.owner != os.getpid():
        return
    try:
        synchronize()
    finally:
        if memory.is_registered:
            unregister(memory.bytes.data_ptr(), memory.device)
        _ledger.remove(memory.pinned_bytes)
