"""What autograd keeps in place of a tensor that it saves."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorstow.base.errors import StowError
from tensorstow.io.arena import Arena
from tensorstow.io.device_link import DeviceEvent
from tensorstow.io.files import IoFuture
from tensorstow.io.pinned import PinnedBlock
from tensorstow.io.scratch import ScratchExtent

Block = Arena | PinnedBlock


class StorageIdentity:
    """Tells a storage from all others: its address in torch is nobody else's while this lives."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Refer to ``storage`` without keeping its memory."""
        self.address = address_of(storage)
        self._weak: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_gone(self) -> bool:
        """Return whether no tensor has the storage any more."""
        return bool(self._weak.expired())


def address_of(storage: torch.UntypedStorage) -> int:
    """Return where torch has its record of a storage."""
    return int(storage._cdata)  # noqa: SLF001


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to."""
    return tensor._version  # noqa: SLF001


@dataclass(eq=False, slots=True)
class SavedStorage:
    """One storage: on its device, in host memory, on disk, or in several of these."""

    number: int
    """Storages are numbered in the order in which forward saves them last; backward needs the
    highest number first."""
    forward: int
    """Which forward saved it: what a later one saves may have other bytes."""
    device: torch.device
    nbytes: int
    version: int
    """The version counter of the tensor that was saved."""
    identity: "StorageIdentity"
    """Of the storage that was saved."""
    tensors: int = 0
    """How many saved tensors use it; without any it is dropped."""
    sources: list[torch.Tensor] = field(default_factory=list)
    """The tensors that were saved, until their bytes are elsewhere."""
    copied: DeviceEvent | None = None
    """Behind the copy from the device to ``host``; None: there is none under way."""
    host: torch.Tensor | None = None
    """The bytes in host memory. On the CPU that is the saved storage itself at first."""
    block: Block | None = None
    """What has the memory of ``host``, where that is the pool's."""
    extent: ScratchExtent | None = None
    checksum: int | None = None
    """Of the bytes that were written to ``extent``; None: nothing was."""
    writing: IoFuture | None = None
    reading: IoFuture | None = None
    device_copy: torch.Tensor | None = None
    """The bytes on the device again, for backward."""
    ready: DeviceEvent | None = None
    """Behind the copy to ``device_copy``."""

    is_used: bool = False
    """Backward was given it: it stays until backward lets go of it."""

    @property
    def data(self) -> torch.Tensor:
        """The bytes in host memory, where they are known to be."""
        if self.host is None:
            message = f"Saved activation {self.number} is not in host memory."
            raise StowError(message)
        return self.host

    @property
    def is_copied(self) -> bool:
        """Whether no copy from the device is under way."""
        return self.copied is None or self.copied.query()

    @property
    def is_busy(self) -> bool:
        """Whether a copy from the device, a write or a read is under way."""
        return (
            not self.is_copied
            or (self.writing is not None and not self.writing.done())
            or (self.reading is not None and not self.reading.done())
        )

    @property
    def key(self) -> tuple[int, int, int]:
        """What tells whether two tensors have the same bytes."""
        return self.forward, self.identity.address, self.version

    @property
    def is_intact(self) -> bool:
        """Whether none of ``sources`` was written to or resized since it was saved."""
        return all(
            version_of(tensor) == self.version and tensor.untyped_storage().nbytes() == self.nbytes
            for tensor in self.sources
        )

    def wait_written(self) -> None:
        """Return when no write is under way; raise its error."""
        if self.writing is not None:
            self.writing.wait()
            self.writing = None


class StoragesByNumber:
    """Storages in the order of their numbers."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._sorted: list[SavedStorage] = []

    def add(self, storage: SavedStorage) -> None:
        """Add one, where it is not in it yet."""
        index = self._index(storage.number)
        if self._sorted[index : index + 1] != [storage]:
            self._sorted.insert(index, storage)

    def discard(self, storage: SavedStorage) -> None:
        """Remove one, where it is in it."""
        index = self._index(storage.number)
        if self._sorted[index : index + 1] == [storage]:
            del self._sorted[index]

    def first(self) -> SavedStorage | None:
        """Return the one that forward saved first, and backward needs last."""
        return self._sorted[0] if self._sorted else None

    def before(self, number: int) -> Iterator[SavedStorage]:
        """Yield those below a number, the highest first; what is yielded may be removed."""
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
    """Where it says that autograd has no use for it any more; appending takes no lock."""
    backward: int | None = None
    """The number of the backward pass that asked for it."""

    def __del__(self) -> None:
        """Let go of the storage."""
        self.released.append(self.storage)

    def over(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor over the bytes of its storage."""
        whole = torch.empty(0, dtype=self.dtype, device=data.device)
        return whole.set_(data.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(eq=False, slots=True)
class KeptTensor:
    """A tensor that stays where it is, and the version that it had."""

    tensor: torch.Tensor
    version: int
