"""Storages on their way from forward to backward: device, host memory, disk, and back.

[Note: What moves when] Forward saves storages in one order, backward asks for them in the other. A
storage of an accelerator is copied to pinned memory behind the kernels that made it, and leaves the
device when the copy is over. On the CPU a storage is in host memory as it is. With a disk, host
memory is bounded: when storages that are not on disk have more than half of the budget, the oldest
are written, beside forward; when all have more than the budget, the oldest leave memory. So the
newest, which backward needs first, are still there when it begins. Backward reads ahead what it
will need next, as far as the budget goes, and copies it to the device.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.scratch import open_scratch

logger = logging.getLogger("tensorstow")

_COPIES_AHEAD = 2
"""Storages that are copied to the device before backward asks for them."""


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """What saved activations hold and have moved."""

    host_bytes: int
    """Host memory that they hold now; on the CPU also that of storages not yet on disk."""
    most_host_bytes: int
    """The most that they held at once."""
    disk_bytes: int
    """Of the scratch files, in use."""
    bytes_read: int
    bytes_written: int
    bytes_down: int
    """From the device to host memory."""
    bytes_up: int
    """From host memory to the device."""


class ActivationPool:
    """Saved storages, and a bound on the host memory that they take."""

    def __init__(self, budget: int | None, directories: Sequence[Path], *, to_disk: bool) -> None:
        """Hold nothing yet.

        Args:
            budget: Bytes of host memory; None: as many as there are.
            directories: Where scratch files go; empty: one is chosen and logged.
            to_disk: Whether storages go on to disk.

        Raises:
            DirectoryError: A directory is missing, read-only, in RAM or too full.
        """
        self._budget = budget
        self._scratch: ScratchFiles | None = None
        if to_disk:
            self._scratch = open_scratch(directories, 0, PipelinePolicy())
        self._lock = threading.RLock()
        self._next = self._forward = 0
        self._by_key: dict[tuple[int, int, int], SavedStorage] = {}
        self._needed = StoragesByNumber()
        """Those that a saved tensor uses."""
        self._unwritten = StoragesByNumber()
        """Those in host memory and not on disk."""
        self._written = StoragesByNumber()
        """Those in host memory and on disk that backward was not given."""
        self._absent = StoragesByNumber()
        """Those on disk alone."""
        self._copying: deque[SavedStorage] = deque()
        self._ending: deque[SavedStorage] = deque()
        """Nobody needs them, and a transfer of theirs is under way."""
        self._released: deque[SavedStorage] = deque()
        self._blocks = HostBlocks(budget)
        self._links: dict[torch.device, DeviceLink] = {}
        self._clean_bytes = 0
        self._most = self._bytes_read = self._bytes_written = 0

    # --- forward ---

    def save(self, tensor: torch.Tensor) -> SavedTensor:
        """Take over the storage of a tensor.

        Args:
            tensor: A strided tensor without autograd's history, on the CPU or an accelerator.

        Returns:
            What ``load`` takes.

        Raises:
            DirectoryError: The disk is full.
            TransferError: A write failed.
        """
        with self._lock:
            self._settle()
            source = tensor.untyped_storage()
            key = (self._forward, address_of(source), version_of(tensor))
            storage = self._by_key.get(key)
            if storage is None:
                self._make_room(source.nbytes())  # until then it is what forward holds anyway
                storage = self._take_over(tensor, source)
            else:
                if storage.sources:
                    storage.sources.append(tensor)  # an alias may count its versions for itself
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
            self._make_room()
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
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(source)
        if tensor.is_cpu:
            storage.host = whole
        else:
            link = self._link(tensor.device)
            storage.block = self._blocks.take(storage.nbytes, tensor.device, link)
            storage.host = storage.block.tensor(0, storage.nbytes, torch.uint8)
            storage.copied = link.d2h([(storage.host, whole)], [link.record_event()])
            self._copying.append(storage)
        storage.sources.append(tensor)
        self._by_key[storage.key] = storage
        self._needed.add(storage)
        self._enter_memory(storage)
        return storage

    def _make_room(self, nbytes: int = 0) -> None:
        """Write and drop the oldest until ``nbytes`` more fit (see the module's note)."""
        if self._scratch is None or self._budget is None:
            return
        while self._blocks.held - self._clean_bytes > self._budget // 2:
            oldest = self._unwritten.first()
            if oldest is None:
                break
            if oldest.copied is not None and not oldest.is_copied:
                if self._blocks.held + nbytes <= self._budget:
                    break  # the link is behind, and there is room
                oldest.copied.synchronize()
            if not oldest.is_intact:
                self._keep_source(oldest)
                continue
            self._write(oldest, self._scratch)
        while self._blocks.held + nbytes > self._budget:
            oldest = self._written.first()
            if oldest is None:
                break
            oldest.wait_written()
            if oldest.reading is not None:  # ahead of need: a failure is told when it is read again
                with suppress(TransferError):
                    oldest.reading.wait()
            self._leave_memory(oldest)
        self._blocks.drop_idle(nbytes)

    def _write(self, storage: SavedStorage, scratch: ScratchFiles) -> None:
        data = storage.data
        extent = scratch.allocate(storage.nbytes)
        storage.checksum = _native.checksum(data.data_ptr(), storage.nbytes)
        storage.writing = scratch.write(extent, data)
        storage.extent = extent
        self._clean_bytes += storage.nbytes
        self._bytes_written += storage.nbytes
        self._list(storage)

    # --- backward ---

    def load(self, saved: SavedTensor) -> torch.Tensor:
        """Return a tensor that was saved, and begin to bring those that backward needs next.

        Raises:
            TransferError: It could not be read.
            DamageError: Other bytes were read than were written.
            RuntimeError: It was written to while it was being moved.
        """
        with self._lock:
            self._settle()
            storage = saved.storage
            data = self._bring(storage)
            storage.is_used = True
            self._list(storage)
            self._bring_ahead(storage)
            return saved.over(data)

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
            if storage.host is None:
                self._make_room(storage.nbytes)
                self._read_back(storage)
            _wait_for(storage)
            if storage.device.type == "cpu":
                return storage.data
            copy = self._copy_up(storage)
        if storage.ready is not None:
            self._link(storage.device).join(storage.ready)
        return copy

    def _bring_ahead(self, storage: SavedStorage) -> None:
        """Read what backward needs next, as far as there is room, and copy the first of it."""
        for other in self._absent.before(storage.number):
            if self._budget is not None and self._blocks.held + other.nbytes > self._budget:
                break
            self._read_back(other)
        if storage.device.type == "cpu":
            return
        remote = (s for s in self._needed.before(storage.number) if s.device.type != "cpu")
        for other in islice(remote, _COPIES_AHEAD):
            is_there = other.host is None or other.sources or other.device_copy is not None
            if not is_there and not other.is_busy:
                _wait_for(other)
                self._copy_up(other)

    def _read_back(self, storage: SavedStorage) -> None:
        if self._scratch is None or storage.extent is None:
            message = f"Saved activation {storage.number} is neither in memory nor on disk."
            raise StowError(message)
        link = self._link(storage.device)
        block = self._blocks.take(storage.nbytes, storage.device, link)
        host = block.tensor(0, storage.nbytes, torch.uint8)
        storage.reading = self._scratch.read(storage.extent, host)
        storage.block, storage.host = block, host
        self._enter_memory(storage)
        self._clean_bytes += storage.nbytes
        self._bytes_read += storage.nbytes

    def _copy_up(self, storage: SavedStorage) -> torch.Tensor:
        link = self._link(storage.device)
        target = torch.empty(storage.nbytes, dtype=torch.uint8, device=storage.device)
        # Where the target's memory was used before, that use must be over.
        storage.ready = link.h2d([(target, storage.data)], [link.record_event()])
        storage.device_copy = target
        return target

    # --- memory and files ---

    def start(self) -> None:
        """Take note that a forward begins: let go of what autograd has let go of."""
        with self._lock:
            self._settle()
            self._forward += 1

    def nbytes(self) -> ActivationBytes:
        """Return what is held now and was moved so far."""
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
        """Wait for copies, reads and writes, and let memory and files go. Idempotent."""
        with self._lock:
            while self._copying:  # their sources are used until then
                copied = self._copying.popleft().copied
                if copied is not None:
                    copied.synchronize()
            if self._scratch is not None:
                self._scratch.close()
            self._blocks.clear()

    def _settle(self) -> None:
        """Do what became possible: drop what nobody needs, let go of what was copied."""
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
        for _ in range(len(self._ending)):
            self._drop(self._ending.popleft())

    def _keep_source(self, storage: SavedStorage) -> None:
        """Move nothing of a storage that was written to or resized: ``load`` raises."""
        self._blocks.held -= storage.nbytes
        storage.host = storage.block = None
        self._list(storage)

    def _drop(self, storage: SavedStorage) -> None:
        """Give everything back, or wait with it for a transfer under way."""
        if storage.is_busy:
            self._ending.append(storage)
            return
        for transfer in (storage.writing, storage.reading):
            try:
                if transfer is not None:
                    transfer.wait()
            except TransferError as error:  # backward had no need of it, the user's disk has
                told = str(error)  # a record that keeps the error keeps its frames, and their graph
                logger.warning("of a saved activation that is not needed any more: %s", told)
        storage.sources.clear()
        if storage.host is not None:
            self._leave_memory(storage)
        if storage.extent is not None and self._scratch is not None:
            self._scratch.release([storage.extent])
            storage.extent = None
            self._list(storage)
        storage.device_copy = None

    def _enter_memory(self, storage: SavedStorage) -> None:
        self._blocks.held += storage.nbytes
        self._list(storage)
        self._most = max(self._most, self._blocks.nbytes)

    def _leave_memory(self, storage: SavedStorage) -> None:
        """Give the storage's host memory back; a version that changed keeps the source."""
        self._blocks.held -= storage.nbytes
        if storage.extent is not None:
            self._clean_bytes -= storage.nbytes
        if storage.is_intact:
            storage.sources.clear()
        storage.reading = None  # if it failed or nobody waited for it, it is read again
        data, storage.host = storage.host, None
        block, storage.block = storage.block, None
        self._list(storage)
        if block is None or data is None:
            return
        if isinstance(block, Arena):
            # Autograd was given this memory: it is used again where no tensor has it any more.
            identity = StorageIdentity(data.untyped_storage())
            del data
            if not identity.is_gone():
                return
        self._blocks.give_back(block, storage.device, storage.ready)

    def _list(self, storage: SavedStorage) -> None:
        """Put a storage into the list that it belongs to now, out of any other."""
        if storage.host is None:
            belongs = None if storage.extent is None else self._absent
        elif storage.extent is None:
            belongs = self._unwritten
        else:
            belongs = None if storage.is_used else self._written
        for storages in (self._unwritten, self._written, self._absent):
            if storages is belongs:
                storages.add(storage)
            else:
                storages.discard(storage)

    def _link(self, device: torch.device) -> DeviceLink:
        if device not in self._links:
            self._links[device] = open_link(device)
        return self._links[device]


def _wait_for(storage: SavedStorage) -> None:
    """Return when no write or read is under way; raise DamageError where what was read is wrong."""
    storage.wait_written()
    if storage.reading is not None:  # until it is known to be right: a second wait fails too
        storage.reading.wait()
        if _native.checksum(storage.data.data_ptr(), storage.nbytes) != storage.checksum:
            message = (
                f"read of {storage.nbytes} bytes of a saved activation gave other bytes than"
                " were written. Look at `dmesg` and the drive's health."
            )
            raise DamageError(message)
        storage.reading = None


def check_version(tensor: torch.Tensor, version: int, nbytes: int | None = None) -> None:
    """Raise RuntimeError, as autograd does, if a saved tensor was written to or resized.

    Args:
        tensor: As it is now.
        version: Its version counter when it was saved.
        nbytes: The bytes that its storage had then; None: not to be compared.
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
