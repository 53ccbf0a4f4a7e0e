"""Where a shard's bytes are: in host memory, or on disk and read before they are needed.

[Note: Copies for an all-gather] FSDP2 copies the shards of one unit after the other, and has copied
a unit's bytes when it reads the next unit's. So one unit on disk is pinned for that at a time, also
if FSDP2 gathers a unit ahead and never uses it.

[Note: Two buffers] A unit's frozen weights that are in the user's files have a buffer of their own:
updates pin the one with its other weights alone. What computes uses both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch

from tensorstow.io.file_runs import Run
from tensorstow.io.pinned import PinnedBlock
from tensorstow.memory.buffer_pool import Decoder, PooledBuffer
from tensorstow.memory.use_order import UseOrder
from tensorstow.tensors.dtensor import pinned_by


@dataclass(frozen=True, slots=True)
class FrozenLayout:
    """A buffer for one rank's rows of a unit's frozen weights, which are read from files."""

    at: Mapping[str, int]
    """Where each weight begins in the buffer, by the model's names."""
    nbytes: int = 0
    runs: Sequence[Run] = ()
    decoder: Decoder | None = None
    """Computes the values of weights that the files have as codes; None: they have none."""
    pieces: Sequence[Sequence[Run]] = ()
    """The reads of each expert, if all weights are stacks of experts; else none."""


class ShardStorage:
    """This rank's shard of one parameter, padded to the size that all ranks' shards have.

    Padding is the last rows of the first dimension; FSDP2 gathers it too. The bytes stay in memory,
    unless a subclass has them elsewhere.
    """

    pager: PooledBuffer | None = None
    """The disk-backed buffer that the bytes are in; None: they stay in host memory."""
    unit: Sequence[PooledBuffer] = ()
    """All buffers of the unit ([Note: Two buffers]); empty: the bytes stay in host memory."""

    def __init__(self, padded: torch.Tensor, rows: int, block: PinnedBlock | None = None) -> None:
        """Use the memory of the shard.

        Args:
            padded: Contiguous host memory, of shape (rows of every rank's shard, ...).
            rows: How many of its rows are this rank's own; the rest is padding.
            block: The page-locked memory that it is part of; None: it is on disk, or pageable.
        """
        self.block = block
        self.padded = padded
        self.local_shard = padded.narrow(0, 0, rows)
        """This rank's elements without padding: what the optimizer updates."""
        self.is_sharded = False
        """Whether FSDP2 has sharded the parameter; before that the bytes must not be used."""
        self.before_read: Callable[[], None] = _do_nothing
        """Returns when the pending update of the weight is finished."""
        self.is_updated: Callable[[], bool] = _true
        """Whether ``before_read`` would wait for no update."""
        self.discard_copies: Callable[[], None] = _do_nothing
        """Wait for copies that read the weight, and discard those made ahead.

        Called before and after a write to it.
        """
        self.bytes_up = 0
        """Bytes of weights that were copied to the device."""

    @property
    def is_page_locked(self) -> bool:
        """Return whether a device can copy from these bytes while the host does other work."""
        return self.block is not None and self.block.pinned

    def pin(self) -> torch.Tensor:
        """Return the newest padded weight, which stays in memory until ``unpin``."""
        self.before_read()
        return self.padded

    def unpin(self, *, dirty: bool = False) -> None:
        """Undo ``pin``; ``dirty``: the bytes were changed and must be written back."""

    def pin_for_copy(self) -> torch.Tensor:
        """Return the newest padded weight, to be copied before the next unit's is pinned."""
        return self.pin()

    def unpin_after_copy(self) -> None:
        """Undo ``pin_for_copy``, for all shards of the unit."""

    @contextmanager
    def access(self, *, write: bool) -> Iterator[None]:
        """Keep ``local_shard`` and ``padded`` in memory inside; ``write``: to change them."""
        self.before_read()
        if write:
            self.discard_copies()
        with pinned_by(self.pager, for_write=write):
            try:
                yield
            finally:
                if write:
                    self.discard_copies()


class DiskShard(ShardStorage):
    """A shard that is on disk, or decoded when it is used, and in memory while it is pinned."""

    pager: PooledBuffer

    def __init__(
        self,
        padded: torch.Tensor,
        rows: int,
        buffer: PooledBuffer,
        prefetcher: "Prefetcher",
        unit: Sequence[PooledBuffer] = (),
    ) -> None:
        """Use the part of ``buffer`` that ``padded`` is over; by itself it is the whole unit."""
        super().__init__(padded, rows)
        self.pager = buffer
        self.unit = tuple(unit) or (buffer,)
        self._prefetcher = prefetcher

    def pin(self) -> torch.Tensor:
        """Return the newest padded weight, which stays in memory until ``unpin``.

        Of experts that are read one by one it has those alone that were read.
        """
        self.before_read()
        self.pager.pin(whole=False)
        try:
            self._prefetcher.record_use(*self.unit)
        except BaseException:  # an interrupt: a pin that was not returned would never be released
            self.pager.unpin()
            raise
        return self.padded

    def unpin(self, *, dirty: bool = False) -> None:
        """Undo ``pin``; ``dirty``: the bytes were changed and must be written back."""
        self.pager.unpin(dirty=dirty)

    def pin_for_copy(self) -> torch.Tensor:
        """Return the newest padded weight, to be copied before the next unit's is pinned."""
        self.before_read()
        self._prefetcher.pin(*self.unit)
        return self.padded

    def unpin_after_copy(self) -> None:
        """Undo ``pin_for_copy``, for all shards of the unit."""
        self._prefetcher.unpin(*self.unit)


class Prefetcher:
    """Pins the buffers that an all-gather copies from, and reads the next units' ahead."""

    def __init__(self, ahead: int) -> None:
        """Read up to ``ahead`` units beyond the one in use."""
        self._ahead = ahead
        self._pinned: tuple[PooledBuffer, ...] = ()
        self._order: UseOrder[tuple[PooledBuffer, ...]] = UseOrder()

    def pin(self, *unit: PooledBuffer) -> None:
        """Return when the buffers of a unit are in memory, where they stay until ``unpin``.

        Those that were pinned before are unpinned: they have been copied.
        """
        if unit != self._pinned:
            self._unpin()
            for buffer in unit:
                buffer.pin()
                # One by one: if the next pin fails, this one is known and can be undone.
                self._pinned = (*self._pinned, buffer)
        self.record_use(*unit)

    def unpin(self, *unit: PooledBuffer) -> None:
        """Unpin the buffers of a unit. Idempotent."""
        if unit == self._pinned:
            self._unpin()

    def record_use(self, *unit: PooledBuffer) -> None:
        """Record the use of a unit's buffers, and begin reading those that follow."""
        # The shards of a unit, one after the other, are one use of the unit.
        if unit == self._order.last[1]:
            return
        self._order.record(unit)
        following = islice(self._order.following(), self._ahead)
        # Any buffer of the unit will do: all units have the same pool.
        unit[0].expect([b for buffers in following for b in buffers if b not in unit])

    def _unpin(self) -> None:
        # Emptied first: after an exception in the loop no buffer is unpinned twice.
        last, self._pinned = self._pinned, ()
        for buffer in last:
            buffer.unpin()


def _do_nothing() -> None:
    pass


def _true() -> bool:
    return True
