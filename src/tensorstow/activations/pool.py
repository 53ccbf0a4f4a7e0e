"""Storages on their way from forward to backward: device, host memory, disk, and back.

[Note: What moves when] Backward needs storages in the reverse order of forward. A storage of an
accelerator is copied to pinned memory after the kernels that wrote it, and leaves the device when
the copy is complete. A storage of the CPU is in host memory from the start. With a disk, host
memory is bounded: when storages that are not on disk exceed half of the budget, the oldest are
written during forward; when all in memory exceed the budget, the oldest leave memory. So backward
begins with the newest, which it needs first, still in memory. It reads the next storages ahead as
far as the budget allows, and copies them to the device.

No thread holds the lock while it waits for the disk or for a copy from the device.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch

import tensorstow._native as _native
from tensorstow.activations.host_blocks import HostBlocks
from tensorstow.activations.saved import (
    SavedStorage,
    SavedTensor,
    StorageIdentity,
    StoragesByNumber,
    address_of,
    version_of,
)
from tensorstow.base.errors import DamageError, StowError, TransferError
from tensorstow.io.arena import Arena
from tensorstow.io.device_link import DeviceLink, open_link
from tensorstow.io.scratch import ScratchFiles
from tensorstow.memory.moving_bytes import ByteState
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.scratch import open_scratch

logger = logging.getLogger("tensorstow")

_COPIES_AHEAD = 2
"""Storages that are copied to the device before backward asks for them."""


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes that saved activations hold and have moved."""

    host_bytes: int
    """Host memory that they hold now; on the CPU also that of storages not yet on disk."""
    most_host_bytes: int
    """Peak of ``host_bytes``."""
    disk_bytes: int
    """Bytes in use in the scratch files."""
    bytes_read: int
    bytes_written: int
    bytes_down: int
    """Bytes copied from the device to host memory."""
    bytes_up: int
    """Bytes copied from host memory to the device."""


class _Links(dict[torch.device, DeviceLink]):
    """A link to each device, opened when it is first asked for."""

    def __missing__(self, device: torch.device) -> DeviceLink:
        return self.setdefault(device, open_link(device))


class ActivationPool:
    """Saved storages, and a bound on the host memory that they take."""

    def __init__(self, budget: int | None, directories: Sequence[Path], *, to_disk: bool) -> None:
        """Hold nothing yet, and later up to ``budget`` bytes of host memory; None: no bound.

        Raises DirectoryError if a directory of scratch files is missing, read-only, in RAM or too
        full; without directories one is chosen and logged.
        """
        self._budget = budget
        self._scratch: ScratchFiles | None = None
        if to_disk:
            self._scratch = open_scratch(directories, 0, PipelinePolicy())
        self._lock = threading.RLock()
        self._next = self._forward = 0
        self._by_key: dict[tuple[int, int, int], SavedStorage] = {}
        self._needed = StoragesByNumber()
        """Storages that a saved tensor uses."""
        self._unwritten = StoragesByNumber()
        """Storages in host memory and not on disk."""
        self._written = StoragesByNumber()
        """Storages in host memory and on disk that backward does not use yet."""
        self._absent = StoragesByNumber()
        """Storages on disk alone."""
        self._copying: deque[SavedStorage] = deque()
        self._ending: deque[SavedStorage] = deque()
        """Storages that no tensor uses, until their transfers are complete."""
        self._released: deque[SavedStorage] = deque()
        self._blocks = HostBlocks(budget)
        self._used = self._blocks.used
        self._links = _Links()
        self._clean_bytes = 0
        self._most = self._bytes_read = self._bytes_written = 0

    # --- forward ---

    def save(self, tensor: torch.Tensor) -> SavedTensor:
        """Take over the storage of a strided tensor; return the argument of ``load``.

        Raises:
            DirectoryError: The disk is full.
            TransferError: A write failed.
        """
        source = tensor.untyped_storage()
        key = (self._forward, address_of(source), version_of(tensor))
        with self._lock:
            self._settle()
            nbytes = 0 if key in self._by_key else source.nbytes()
        with self._room(nbytes):  # forward itself holds these bytes until now
            # Looked up again: ``_room`` gives up the lock while it waits.
            storage = self._by_key.get(key)
            if storage is None:
                storage = self._take_over(tensor, source)
            else:
                if storage.sources:
                    storage.sources.append(tensor)  # an alias may have its own version counter
                # The lists are sorted by number: the storage leaves them before that changes.
                for storages in (self._needed, self._unwritten, self._written, self._absent):
                    storages.discard(storage)
                storage.number = self._next  # backward needs it for this tensor first
                self._needed.add(storage)
                self._list(storage)
            self._next += 1
            storage.tensors += 1
            saved = SavedTensor(
                storage,
                tensor.dtype,
                tensor.size(),
                tensor.stride(),
                int(tensor.storage_offset()),
                self._released,
            )
        # The new storage may take those not on disk past half of the budget: writes begin.
        with self._room(0):
            return saved

    def _take_over(self, tensor: torch.Tensor, source: torch.UntypedStorage) -> SavedStorage:
        storage = SavedStorage(
            self._next,
            self._forward,
            tensor.device,
            source.nbytes(),
            version_of(tensor),
            StorageIdentity(source),
        )
        # The whole storage, of which the tensor may be a part: others may share it.
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(source)
        if tensor.is_cpu:
            storage.host = whole
        else:
            link = self._links[tensor.device]
            storage.block = self._blocks.take(storage.nbytes, tensor.device, link)
            storage.host = storage.block.tensor(0, storage.nbytes, torch.uint8)
            storage.copied = link.d2h([(storage.host, whole)], [link.record_event()])
            self._copying.append(storage)
        storage.sources.append(tensor)
        storage.move(ByteState.PRESENT)
        self._by_key[storage.key] = storage
        self._needed.add(storage)
        self._enter_memory(storage)
        return storage

    @contextmanager
    def _room(self, nbytes: int) -> Iterator[None]:
        """Hold the lock, with room for ``nbytes`` more; waits for that without the lock."""
        while True:
            with self._lock:
                self._settle()
                wait = self._make_room(nbytes)
                if wait is None:
                    yield
                    return
            wait()

    def _make_room(self, nbytes: int) -> Callable[[], object] | None:
        """Write and drop the oldest until ``nbytes`` more fit (see the module's note).

        Return what to wait for before the next try; None: there is room, or nothing can leave.
        """
        if self._scratch is None or self._budget is None:
            return None
        wait = self._write_oldest(nbytes, self._scratch, self._budget // 2)
        while wait is None and not self._used.fits(nbytes):
            oldest = self._written.first()
            if oldest is None:
                break
            if not oldest.is_over():
                return partial(_wait_for, oldest)
            if oldest.state is ByteState.WRITING:
                oldest.settle()
            self._leave_memory(oldest)
        if wait is None:
            self._blocks.drop_idle(nbytes)
        return wait

    def _write_oldest(
        self, nbytes: int, scratch: ScratchFiles, limit: int
    ) -> Callable[[], object] | None:
        """Write the oldest until those that are not on disk are within ``limit``."""
        while self._used.held - self._clean_bytes > limit:
            oldest = self._unwritten.first()
            if oldest is None:
                break
            if oldest.copied is not None and not oldest.is_copied:
                if self._used.fits(nbytes):
                    break  # the copy is not complete, and nothing needs its memory yet
                return oldest.copied.synchronize
            if not oldest.is_intact:  # its sources stay as they are: ``load`` raises
                self._used.give(oldest.nbytes)
                oldest.host = oldest.block = None
                oldest.leave()
                self._list(oldest)
                continue
            self._write(oldest, scratch)
        return None

    def _write(self, storage: SavedStorage, scratch: ScratchFiles) -> None:
        data = storage.data
        extent = scratch.allocate(storage.nbytes)
        storage.checksum = _native.checksum_by_blocks(data.data_ptr(), storage.nbytes)
        storage.begin(ByteState.WRITING, scratch.write(extent, data))
        storage.extent = extent
        self._clean_bytes += storage.nbytes
        self._bytes_written += storage.nbytes
        self._list(storage)

    # --- backward ---

    def load(self, saved: SavedTensor) -> torch.Tensor:
        """Return a tensor that was saved, and start to fetch those that backward needs next.

        Raises:
            TransferError: The read failed.
            DamageError: The bytes that were read differ from those written.
            RuntimeError: The tensor was written to before its bytes were copied.
        """
        storage = saved.storage
        was_used, storage.is_used = storage.is_used, True  # it stays in memory from now on
        try:
            self._read(storage)
            with self._lock:
                data = self._bring(storage)
                self._bring_ahead(storage)
                return saved.over(data)
        except BaseException:
            with self._lock:
                # Backward did not get it, so it may leave memory again.
                storage.is_used = was_used
                self._list(storage)
            raise

    def _read(self, storage: SavedStorage) -> None:
        """Return when the storage's bytes are in memory, or on their device."""
        with self._lock:
            self._settle()
            self._list(storage)
            if storage.sources or storage.device_copy is not None:
                return
            is_absent = storage.host is None
        if is_absent:
            with self._room(storage.nbytes):
                if storage.host is None:  # else another thread has begun to read it
                    self._read_back(storage)
        _wait_for(storage)

    def _bring(self, storage: SavedStorage) -> torch.Tensor:
        """Return the storage's bytes on its device."""
        if storage.sources:
            for tensor in storage.sources:
                check_version(tensor, storage.version, storage.nbytes)
            source = storage.sources[0].untyped_storage()
            return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(source)
        if storage.device_copy is not None:
            copy = storage.device_copy
        else:
            storage.settle(partial(_check, storage))
            if storage.device.type == "cpu":
                return storage.data
            copy = _copy_up(storage, self._links[storage.device])
        if storage.ready is not None:
            self._links[storage.device].join(storage.ready)
        return copy

    def _bring_ahead(self, storage: SavedStorage) -> None:
        """Read the next storages of backward as far as there is room, and copy the first ones."""
        for other in self._absent.before(storage.number):
            # No smaller one is read in its place: backward needs this one first.
            if not self._used.fits(other.nbytes):
                break
            self._read_back(other)
        if storage.device.type == "cpu":
            return
        remote = (s for s in self._needed.before(storage.number) if s.device.type != "cpu")
        for other in islice(remote, _COPIES_AHEAD):
            is_on_device = other.sources or other.device_copy is not None
            if other.host is not None and not is_on_device and not other.is_busy:
                other.settle(partial(_check, other))
                _copy_up(other, self._links[other.device])

    def _read_back(self, storage: SavedStorage) -> None:
        if self._scratch is None or storage.extent is None:
            message = f"Saved activation {storage.number} is neither in memory nor on disk."
            raise StowError(message)
        link = self._links[storage.device]
        block = self._blocks.take(storage.nbytes, storage.device, link)
        host = block.tensor(0, storage.nbytes, torch.uint8)
        storage.begin(ByteState.READING, self._scratch.read(storage.extent, host))
        storage.block, storage.host = block, host
        self._enter_memory(storage)
        self._clean_bytes += storage.nbytes
        self._bytes_read += storage.nbytes

    # --- memory and files ---

    def start(self) -> None:
        """Begin a forward: drop the storages that autograd has released."""
        with self._lock:
            self._settle()
            self._forward += 1

    def nbytes(self) -> ActivationBytes:
        """Return the bytes that are held now and were moved so far."""
        with self._lock:
            self._settle()
            return ActivationBytes(
                host_bytes=self._blocks.nbytes,
                most_host_bytes=self._most,
                disk_bytes=0 if self._scratch is None else self._scratch.used_bytes,
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
                bytes_down=sum(link.bytes_down for link in self._links.values()),
                bytes_up=sum(link.bytes_up for link in self._links.values()),
            )

    def close(self) -> None:
        """Wait for copies, reads and writes, and free memory and files. Idempotent."""
        with self._lock:
            copying = [storage.copied for storage in self._copying]
        for copied in copying:  # their sources are used until then
            if copied is not None:
                copied.synchronize()
        if self._scratch is not None:
            self._scratch.close()
        with self._lock:
            self._copying.clear()
            self._blocks.clear()

    def _settle(self) -> None:
        """Release sources whose copies are complete, and drop storages that no tensor uses."""
        while self._copying and self._copying[0].is_copied:
            storage = self._copying.popleft()
            storage.copied = None
            if storage.is_intact:  # else ``load`` raises
                storage.sources.clear()
        self._blocks.settle()
        while self._released:
            storage = self._released.popleft()
            storage.tensors -= 1
            if not storage.tensors:
                self._by_key.pop(storage.key, None)
                self._needed.discard(storage)
                self._ending.append(storage)
        # Once each: ``_drop`` puts those back whose transfers go on.
        for _ in range(len(self._ending)):
            self._drop(self._ending.popleft())

    def _drop(self, storage: SavedStorage) -> None:
        """Free a storage's memory and disk space, later if a transfer is in progress."""
        if storage.is_busy:
            self._ending.append(storage)
            return
        try:
            storage.wait()
        except TransferError as error:  # backward needs no bytes, but the disk has a fault
            message = str(error)  # a record with the error itself would keep the graph alive
            logger.warning("of a saved activation that is not needed any more: %s", message)
        storage.sources.clear()
        if storage.host is not None:
            self._leave_memory(storage)
        if storage.extent is not None and self._scratch is not None:
            self._scratch.release([storage.extent])
            storage.extent = None
            self._list(storage)
        storage.device_copy = None

    def _enter_memory(self, storage: SavedStorage) -> None:
        self._used.take(storage.nbytes)
        self._list(storage)
        self._most = max(self._most, self._blocks.nbytes)

    def _leave_memory(self, storage: SavedStorage) -> None:
        """Give back the storage's host memory; keep the sources if a version changed."""
        self._used.give(storage.nbytes)
        if storage.extent is not None:
            self._clean_bytes -= storage.nbytes
        if storage.is_intact:
            storage.sources.clear()
        storage.leave()  # a failed or unused read is made again
        data, storage.host = storage.host, None
        block, storage.block = storage.block, None
        self._list(storage)
        if block is None or data is None:
            return
        if isinstance(block, Arena):
            # Autograd may have tensors over this memory: reuse it only if none is left.
            identity = StorageIdentity(data.untyped_storage())
            del data
            if not identity.is_gone():
                return
        self._blocks.give_back(block, storage.device, storage.ready)

    def _list(self, storage: SavedStorage) -> None:
        """Move a storage to the list that it belongs to now."""
        if storage.host is None:
            belongs = None if storage.extent is None else self._absent
        elif storage.extent is None:
            belongs = self._unwritten
        else:
            belongs = None if storage.is_used else self._written  # backward has it: it stays
        for storages in (self._unwritten, self._written, self._absent):
            if storages is belongs:
                storages.add(storage)
            else:
                storages.discard(storage)


def _copy_up(storage: SavedStorage, link: DeviceLink) -> torch.Tensor:
    """Begin copying a storage from host memory to its device."""
    target = torch.empty(storage.nbytes, dtype=torch.uint8, device=storage.device)
    # The event: earlier kernels that used the target's memory must be complete.
    storage.ready = link.h2d([(target, storage.data)], [link.record_event()])
    storage.device_copy = target
    return target


def _wait_for(storage: SavedStorage) -> None:
    """Wait until no read or write is under way; ``settle`` raises the errors."""
    with suppress(OSError):
        storage.wait()


def _check(storage: SavedStorage) -> None:
    """Raise DamageError if a read returned wrong bytes."""
    is_read = storage.state is ByteState.READING
    if (
        is_read
        and _native.checksum_by_blocks(storage.data.data_ptr(), storage.nbytes) != storage.checksum
    ):
        message = (
            f"read of {storage.nbytes} bytes of a saved activation gave other bytes than"
            " were written. Look at `dmesg` and the drive's health."
        )
        raise DamageError(message)


def check_version(tensor: torch.Tensor, version: int, nbytes: int | None = None) -> None:
    """Raise RuntimeError, as autograd does, if a saved tensor was written to or resized.

    ``nbytes`` are those of its storage when it was saved; None: do not compare them.
    """
    resized = nbytes is not None and tensor.untyped_storage().nbytes() != nbytes
    if version_of(tensor) != version or resized:
        message = (
            "one of the variables needed for gradient computation has been modified by an inplace"
            f" operation: a tensor of {tuple(tensor.shape)}, {tensor.dtype}, is at version"
            f" {version_of(tensor)}; expected version {version} instead."
        )
        if resized:
            message += f" Its storage was resized from {nbytes} bytes."
        raise RuntimeError(message)
