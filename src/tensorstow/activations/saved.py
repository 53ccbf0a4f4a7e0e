"""Objects that autograd keeps in place of the tensors that it saves."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorstow.base.errors import StowError
from tensorstow.io.device_link import DeviceEvent
from tensorstow.io.pinned import HostMemory
from tensorstow.io.scratch import ScratchExtent
from tensorstow.memory.moving_bytes import MovingBytes


class StorageIdentity:
    """The identity of a storage: while this lives, no other storage has its address in torch."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address = address_of(storage)
        self._weak: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_gone(self) -> bool:
        """Return whether no tensor has the storage any more."""
        return bool(self._weak.expired())


def address_of(storage: torch.UntypedStorage) -> int:
    """Return the address of torch's record of a storage."""
    return int(storage._cdata)  # noqa: SLF001


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to."""
    return tensor._version  # noqa: SLF001


@dataclass(eq=False, slots=True)
class SavedStorage(MovingBytes):
    """One storage: on its device, in host memory, on disk, or in several of these.

    The state is that of its bytes in host memory.
    """

    number: int
    """Storages are numbered in the order in which forward saves them last; backward needs the
    highest number first."""
    forward: int
    """The number of the forward that saved it: a later one may save other bytes."""
    device: torch.device
    nbytes: int
    version: int
    """The version counter of the tensor that was saved."""
    identity: "StorageIdentity"
    """Identity of the saved storage."""
    tensors: int = 0
    """Number of saved tensors that use it; at 0 it is dropped."""
    sources: list[torch.Tensor] = field(default_factory=list)
    """The saved tensors, until their bytes are copied or written."""
    copied: DeviceEvent | None = None
    """Event after the copy from the device to ``host``; None: no copy is in progress."""
    host: torch.Tensor | None = None
    """The bytes in host memory. On the CPU that is the saved storage itself at first."""
    block: HostMemory | None = None
    """The pool's memory that ``host`` is in; None: it is not the pool's."""
    extent: ScratchExtent | None = None
    checksum: int | None = None
    """Checksum of the bytes in ``extent``; None: nothing was written."""
    device_copy: torch.Tensor | None = None
    """The bytes on the device again, for backward."""
    ready: DeviceEvent | None = None
    """Event after the copy to ``device_copy``."""

    is_used: bool = False
    """Whether backward has it: then it stays until backward releases it."""

    @property
    def data(self) -> torch.Tensor:
        """The bytes, which must be in host memory."""
        if self.host is None:
            message = f"Saved activation {self.number} is not in host memory."
            raise StowError(message)
        return self.host

    @property
    def is_copied(self) -> bool:
        """Whether no copy from the device is in progress."""
        return self.copied is None or self.copied.query()

    @property
    def is_busy(self) -> bool:
        """Whether a copy from the device, a write or a read is in progress."""
        return not self.is_copied or not self.is_over()

    @property
    def key(self) -> tuple[int, int, int]:
        """A key that is equal for tensors with the same bytes."""
        return self.forward, self.identity.address, self.version

    @property
    def is_intact(self) -> bool:
        """Whether none of ``sources`` was written to or resized since it was saved."""
        return all(
            version_of(tensor) == self.version and tensor.untyped_storage().nbytes() == self.nbytes
            for tensor in self.sources
        )


class StoragesByNumber:
    """Storages in the order of their numbers."""

    def __init__(self) -> None:
        self._sorted: list[SavedStorage] = []

    def add(self, storage: SavedStorage) -> None:
        """Add a storage if it is not in the list yet."""
        index = self._index(storage.number)
        if self._sorted[index : index + 1] != [storage]:
            self._sorted.insert(index, storage)

    def discard(self, storage: SavedStorage) -> None:
        """Remove a storage if it is in the list."""
        index = self._index(storage.number)
        if self._sorted[index : index + 1] == [storage]:
            del self._sorted[index]

    def first(self) -> SavedStorage | None:
        """Return the storage that forward saved first and backward needs last."""
        return self._sorted[0] if self._sorted else None

    def before(self, number: int) -> Iterator[SavedStorage]:
        """Yield storages below a number, the highest first; the caller may remove them."""
        for index in range(self._index(number) - 1, -1, -1):
            yield self._sorted[index]

    def _index(self, number: int) -> int:
        return bisect_left(self._sorted, number, key=attrgetter("number"))


@dataclass(eq=False, slots=True)
class SavedTensor:
    """A tensor whose bytes are in a ``SavedStorage``."""

    storage: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    released: deque[SavedStorage] = field(repr=False)
    """Queue of storages that autograd has released; appending takes no lock."""
    backward: int | None = None
    """The number of the backward pass that used it."""

    def __del__(self) -> None:
        self.released.append(self.storage)

    def over(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor over the bytes of its storage."""
        whole = torch.empty(0, dtype=self.dtype, device=data.device)
        return whole.set_(data.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(eq=False, slots=True)
class KeptTensor:
    """A tensor that is not moved, and its version when it was saved."""

    tensor: torch.Tensor
    version: int
