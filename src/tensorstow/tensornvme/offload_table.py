"""A table of the tensors that are in memory, on disk, or moving between the two."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorstow.base.errors import DirectoryError, DTypeError, StowError, TransferError
from tensorstow.base.health import Health
from tensorstow.base.sizes import round_up
from tensorstow.io.files import ALIGN, IoFuture, check_movable
from tensorstow.io.scratch import ScratchExtent, ScratchFiles
from tensorstow.memory.moving_bytes import ByteState, MovingBytes

_LEAST_STRIPE = 1 << 20  # smaller stripes on more disks are slower, not faster


@dataclass(frozen=True, slots=True)
class Stripe:
    """The bytes ``start`` to ``stop`` of a tensor, and their place on disk."""

    extent: ScratchExtent
    start: int
    stop: int


def take_stripes(files: ScratchFiles, sizes: Iterable[int]) -> tuple[tuple[Stripe, ...], ...]:
    """Return space for tensors of these bytes; raises DirectoryError if a disk has too little.

    Every file gets an equal part of a tensor, but none of less than 1 MiB.
    """
    taken: list[list[Stripe]] = []
    try:
        for nbytes in sizes:
            count = max(1, min(len(files.files), nbytes // _LEAST_STRIPE))
            width = round_up(-(-nbytes // count), ALIGN)
            taken.append([])
            for start in range(0, nbytes, max(width, 1)):
                stop = min(start + width, nbytes)
                taken[-1].append(Stripe(files.allocate(stop - start), start, stop))
    except BaseException:
        release_stripes(files, taken)
        raise
    return tuple(map(tuple, taken))


def release_stripes(files: ScratchFiles, tensors: Iterable[Iterable[Stripe]]) -> None:
    """Free the space of these tensors' stripes."""
    files.release(stripe.extent for stripes in tensors for stripe in stripes)


Callback = Callable[[], object]

_FORKED = (
    "A DiskOffloader was used in a forked process: its threads and files belong to the parent."
    " Create another in this process."
)
_FEW = 64


class OffloadError(StowError, RuntimeError):
    """A tensor cannot be written or read; a RuntimeError, as TensorNVMe raises."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensors:
    """Storages on disk that were written in one call, and must be read in one."""

    storages: tuple[StorageWeakRef, ...]
    """Weak references: the disk space of a tensor that no longer exists is freed."""
    sizes: tuple[int, ...]
    stripes: tuple[tuple[Stripe, ...], ...]

    @property
    def keys(self) -> tuple[int, ...]:
        """The keys of the storages. Their weak references keep the addresses from being reused."""
        return tuple(ref.cdata for ref in self.storages)

    def is_expired(self) -> bool:
        """Return whether none of the tensors exists any more."""
        return bool(self.storages) and all(map(_is_gone, self.storages))


@dataclass(slots=True, eq=False)
class Operation(MovingBytes):
    """One call in flight. It holds the storages, since tensors may be set to others."""

    storages: tuple[torch.UntypedStorage, ...]
    stored: StoredTensors
    callback: Callback | None


class OffloadTable:
    """Table of tensors on disk and operations in flight, by the tensors' storages.

    [Note: Where a tensor is] A storage is in memory (in neither table); in ``_stored``, without
    bytes of its own; or in ``_moving`` until ``finish``, with both its bytes and its disk space in
    use. A write ends in ``_stored``, or in memory if it failed. A read ends in memory, or in
    ``_stored`` if it failed. Nothing else changes this state.
    """

    def __init__(self, scratch: ScratchFiles) -> None:
        """Take ownership of ``scratch``."""
        self._health = Health(_FORKED)
        self._scratch = scratch
        self._open = True
        self._stored: dict[int, StoredTensors] = {}
        self._moving: dict[int, Operation] = {}
        self._operations: dict[Operation, None] = {}  # in the order of the calls
        self._failures: list[tuple[ByteState, StowError]] = []
        self._callbacks: deque[Callback] = deque()
        self._many_stored = _FEW

    def write(self, tensors: tuple[torch.Tensor, ...], callback: Callback | None) -> Operation:
        """Wait for other operations on these tensors, then start writing."""
        keys = self._begin(tensors)
        for tensor, key in zip(tensors, keys, strict=True):
            if key in self._stored:
                message = f"{_name(tensor)} was asked to be written but is on disk. Read it first."
                raise OffloadError(message)
            _check_freeable(tensor)
        sizes = tuple(tensor.nbytes for tensor in tensors)
        storages = tuple(map(_storage_of, tensors))
        stored = StoredTensors(storages, sizes, self._take_stripes(sizes))
        try:
            return self._start(ByteState.WRITING, tensors, stored, callback)
        except BaseException:
            self._release(stored)
            raise

    def read(self, tensors: tuple[torch.Tensor, ...], callback: Callback | None) -> Operation:
        """Wait for other operations on these tensors, then allocate memory and start reading."""
        keys = self._begin(tensors)
        stored = self._stored.get(keys[0]) if keys else None
        if stored is None or stored.keys != keys:
            raise OffloadError(self._why_unreadable(tensors, keys))
        for tensor, size in zip(tensors, stored.sizes, strict=True):
            if tensor.nbytes != size:
                message = (
                    f"{_name(tensor)} was to be read, but {size} bytes were written."
                    " Give it the shape and dtype that it was written with."
                )
                raise OffloadError(message)
        try:
            for tensor in tensors:
                tensor.untyped_storage().resize_(tensor.nbytes)
            operation = self._start(ByteState.READING, tensors, stored, callback)
        except BaseException:
            _free([tensor.untyped_storage() for tensor in tensors])
            raise
        for key in keys:
            del self._stored[key]
        return operation

    def wait_for(self, operation: Operation) -> None:
        """Wait until ``operation`` is done; raise its error."""
        failure = self._finish(operation)
        if failure is not None:
            raise failure
        self._run_callbacks()

    def wait_for_all(self, states: Collection[ByteState]) -> None:
        """Wait for all operations in ``states``; run callbacks; raise the first error."""
        self._check_usable()
        while chosen := [o for o in self._operations if o.state in states]:
            for operation in chosen:
                self._finish_quietly(operation)
            self._run_callbacks()  # which may start more
        self._run_callbacks()
        self._raise_failures(states)

    def close(self) -> None:
        """Shut down, run the callbacks of reads, raise the first error. Idempotent."""
        self.shut()
        if self._health.is_ours:
            self._run_callbacks()
            self._raise_failures(set(ByteState))

    def shut(self) -> tuple[list[StowError], int]:
        """Finish reads, abandon writes, drop the files; return errors and the count of lost ones.

        Tensors whose write is abandoned keep their memory; those on disk are lost.
        """
        if not self._open:
            return [], 0
        self._open = False
        if not self._health.is_ours:
            self._scratch.close()
            return [], 0
        for operation in list(self._operations):
            self._finish_quietly(operation)
        self._scratch.close()
        lost = sum(not _is_gone(r) for p in set(self._stored.values()) for r in p.storages)
        return [failure for _, failure in self._failures], lost

    def _begin(self, tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
        """Check the tensors, finish operations that are done, wait for those on these tensors."""
        self._check_usable()
        for tensor in tensors:
            try:
                check_movable(tensor)
            except DTypeError as error:
                raise OffloadError(str(error)) from error
        keys = tuple(_storage_of(tensor).cdata for tensor in tensors)
        if len(set(keys)) != len(keys):
            message = "The list names the same memory twice. Give each tensor once, and no views."
            raise OffloadError(message)
        for finished in list(self._operations):
            if finished.is_over():
                self._finish_quietly(finished)
        self._run_callbacks()
        # Callbacks may have started new operations: repeat until none is on these tensors.
        while operation := next((self._moving[k] for k in keys if k in self._moving), None):
            self.wait_for(operation)
        return keys

    def _start(
        self,
        state: ByteState,
        tensors: tuple[torch.Tensor, ...],
        stored: StoredTensors,
        callback: Callback | None,
    ) -> Operation:
        futures: list[IoFuture] = []
        try:
            for tensor, stripes in zip(tensors, stored.stripes, strict=True):
                # Its bytes, whatever its dtype and shape: stripes end inside of elements too.
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                for stripe in stripes:
                    file = self._scratch.files[stripe.extent.file]
                    move = file.write if state is ByteState.WRITING else file.read
                    part = whole[stripe.start : stripe.stop]
                    futures.append(move(part, stripe.extent.offset))
        except BaseException:
            futures.clear()  # a dropped future waits for its transfer: the memory may be freed
            raise
        storages = tuple(tensor.untyped_storage() for tensor in tensors)
        operation = Operation(storages, stored, callback)
        if state is ByteState.WRITING:
            operation.move(ByteState.PRESENT)
        operation.begin(state, *futures)
        self._operations[operation] = None
        self._moving |= dict.fromkeys(stored.keys, operation)
        return operation

    def _finish(self, operation: Operation) -> StowError | None:
        """Wait for ``operation``, record the state of its tensors, and return its error."""
        failure = None
        try:
            operation.wait()
        except TransferError as error:
            failure = error
        del self._operations[operation]
        for key in operation.stored.keys:
            del self._moving[key]
        writing = operation.state is ByteState.WRITING
        is_abandoned = writing and not self._open
        if (failure is None) == writing and not is_abandoned:
            _free(operation.storages)
            self._stored |= dict.fromkeys(operation.stored.keys, operation.stored)
        else:
            self._release(operation.stored)
        if failure is None and operation.callback is not None and not is_abandoned:
            self._callbacks.append(operation.callback)
        return failure

    def _finish_quietly(self, operation: Operation) -> None:
        failure = self._finish(operation)
        if failure is not None:
            self._failures.append((operation.state, failure))

    def _run_callbacks(self) -> None:
        # If one raises an error, the later ones remain for the next call.
        while self._callbacks:
            self._callbacks.popleft()()

    def _raise_failures(self, states: Collection[ByteState]) -> None:
        failures = [failure for state, failure in self._failures if state in states]
        self._failures = [(k, failure) for k, failure in self._failures if k not in states]
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"It also happened: {other}")
            raise failures[0]

    def _take_stripes(self, sizes: Sequence[int]) -> tuple[tuple[Stripe, ...], ...]:
        if len(self._stored) > self._many_stored:
            self._drop_expired()
            # Doubled, so that looking at all of them costs little per write.
            self._many_stored = max(_FEW, 2 * len(self._stored))
        try:
            return take_stripes(self._scratch, sizes)
        except DirectoryError:
            if not self._drop_expired():
                raise
        return self._take_stripes(sizes)

    def _drop_expired(self) -> bool:
        """Free the disk space of tensors that no longer exist; return whether there were any."""
        expired = [stored for stored in set(self._stored.values()) if stored.is_expired()]
        for stored in expired:
            for key in stored.keys:
                del self._stored[key]
            self._release(stored)
        return bool(expired)

    def _release(self, stored: StoredTensors) -> None:
        release_stripes(self._scratch, stored.stripes)

    def _why_unreadable(self, tensors: Sequence[torch.Tensor], keys: Sequence[int]) -> str:
        for tensor, key in zip(tensors, keys, strict=True):
            if key not in self._stored:
                return f"{_name(tensor)} was asked to be read but was not written here."
        written = [len(self._stored[key].keys) for key in keys]
        return (
            f"{len(keys)} tensors were asked to be read, but were written in lists of {written}."
            " Give the same tensors in one list, in the order in which they were written."
        )

    def _check_usable(self) -> None:
        self._health.check_process()
        if not self._open:
            message = "A DiskOffloader was used after it was closed. Make another."
            raise OffloadError(message)


def _check_freeable(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 and tensor.nbytes:
        message = f"{_name(tensor)} has no memory: its storage was emptied, perhaps offloaded."
        raise OffloadError(message)
    if tensor.storage_offset() or storage.nbytes() != tensor.nbytes:
        message = (
            f"{_name(tensor)} is a view of {tensor.nbytes} bytes at byte"
            f" {tensor.storage_offset() * tensor.element_size()} of {storage.nbytes()}; freeing"
            " it would free the rest too. Write the tensor that it views, or a clone()."
        )
        raise OffloadError(message)
    if not storage.resizable():
        message = (
            f"{_name(tensor)} has memory that torch did not allocate (numpy, shared memory, a"
            " mapped file) and cannot free. Give a clone()."
        )
        raise OffloadError(message)


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _free(storages: Sequence[torch.UntypedStorage]) -> None:
    for storage in storages:
        storage.resize_(0)


def _name(tensor: torch.Tensor) -> str:
    return f"A tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
