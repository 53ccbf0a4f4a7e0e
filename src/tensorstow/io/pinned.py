"""Host memory that an accelerator copies from and to, registered with it where that works."""

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tensorstow.base.sizes import format_bytes
from tensorstow.io.arena import Arena

logger = logging.getLogger("tensorstow")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class PinnedBlock:
    """``nbytes`` of host memory, zero-filled, that copies from and to ``device`` can run behind.

    On CUDA and ROCm an arena is registered as one block; on other accelerators torch's pinned
    allocator gives the memory. Where neither can, the memory is pageable, ``pinned`` is False and
    a warning is logged: copies then hold their caller up. For the CPU it is an arena as it is.
    """

    def __init__(self, nbytes: int, device: torch.device, settle: Callable[[], None]) -> None:
        """Take the memory; ``settle`` returns when no copy uses it, and is called before it goes.

        Raises BudgetError where the system has no room.
        """
        self.nbytes = nbytes
        self.pinned = device.type == "cpu"
        made = _from_torch(nbytes) if device.type not in {"cpu", "cuda"} else None
        if made is not None:
            self._bytes, self.pinned = made, True
            weakref.finalize(self, _release, settle, made, None, os.getpid())
            return
        arena = Arena(nbytes, in_children=False)
        self._bytes = arena.tensor(0, nbytes, torch.uint8)
        if device.type == "cuda":
            self.pinned = register(arena.address, nbytes, device)
        if not self.pinned:
            _warn(nbytes, device)
        registered = arena.address if device.type == "cuda" and self.pinned else None
        weakref.finalize(self, _release, settle, self._bytes, registered, os.getpid())

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D view of ``count`` elements from byte ``offset``, a multiple of theirs."""
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)


def register(address: int, nbytes: int, device: torch.device) -> bool:
    """Pin memory for CUDA or ROCm; return whether the driver did."""
    failed = int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE)) != 0
    if failed:
        # The driver keeps the error for whoever asks next, which must not be an innocent kernel.
        try:
            torch.empty(1, device=device).zero_()
        except RuntimeError:
            logger.debug("the driver's error of cudaHostRegister was taken back")
    return not failed


def unregister(address: int) -> None:
    """Unpin what ``register`` pinned."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:  # noqa: ANN401  # a compiled module that has no types
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _from_torch(nbytes: int) -> torch.Tensor | None:
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return None


_warned: set[str] = set()


def _warn(nbytes: int, device: torch.device) -> None:
    if device.type in _warned:
        return
    _warned.add(device.type)
    logger.warning(
        "%s of host memory could not be pinned for %s: copies are slower and hold training up."
        " Raise the limit of locked memory (`ulimit -l`, in containers --ulimit memlock=-1).",
        format_bytes(nbytes),
        device.type,
    )


def _release(
    settle: Callable[[], None], memory: torch.Tensor, registered: int | None, owner: int
) -> None:
    """Let go of ``memory`` when no copy uses it; it is an argument so that it lives until then."""
    del memory
    if owner != os.getpid():
        return  # a forked child has neither the mapping nor the driver
    settle()
    if registered is not None:
        unregister(registered)
