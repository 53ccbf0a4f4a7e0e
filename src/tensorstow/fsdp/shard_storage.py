"""A cell: this rank's bytes of one parameter, and who may read them when."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tensorstow.fsdp.prefetch import Prefetcher
from tensorstow.io.buffer_pool import Shelf
from tensorstow.io.pinned import PinnedBlock


class Cell:
    """One parameter's shard in host memory, padded to the size that all ranks' shards have.

    ``rows`` of the padded tensor's first dimension are this rank's; FSDP2 gathers the padding too.
    """

    def __init__(self, padded: torch.Tensor, rows: int, block: PinnedBlock | None = None) -> None:
        """Take ``padded``, which is contiguous host memory; of ``block``, where it is pinned."""
        self.padded = padded
        self.block = block
        self.home = padded.narrow(0, 0, rows)
        """This rank's elements, without padding: what the optimizer updates."""
        self.lessor: Shelf | None = None
        """Where the bytes are on disk; None: they stay in host memory."""
        self.before_read: Callable[[], None] = _at_once
        """Returns when the weight is the newest one."""
        self.before_write: Callable[[], None] = _at_once
        """Returns when no copy of the weight is under way, and none is kept that will be used."""
        self.bytes_down = 0
        """Of gradients that came from the device."""
        self.bytes_up = 0
        """Of weights that were given to it."""

    @property
    def is_pinned(self) -> bool:
        """Return whether a device copies from it beside what the host does."""
        return self.block is not None and self.block.pinned

    def open(self) -> torch.Tensor:
        """Return the padded weight, the newest one; it may be read until ``close``."""
        self.before_read()
        return self.padded

    def close(self, *, changed: bool = False) -> None:
        """Say that what ``open`` returned was read, or by ``changed`` that it was written to."""

    def open_to_copy(self) -> torch.Tensor:
        """Return what ``open`` does, to be copied before another unit's is asked for."""
        return self.open()

    def copied(self) -> None:
        """Say that what ``open_to_copy`` returned was copied."""
        self.close()

    @contextmanager
    def opened(self, *, to_change: bool) -> Iterator[None]:
        """Let ``home`` and ``padded`` be read inside, and written where ``to_change``."""
        self.before_read()
        if to_change:
            self.before_write()
        yield


class ShelvedCell(Cell):
    """One parameter's shard on a shelf."""

    def __init__(
        self, padded: torch.Tensor, rows: int, shelf: Shelf, prefetcher: Prefetcher
    ) -> None:
        """Take ``padded``, which is a view of the shelf's memory."""
        super().__init__(padded, rows)
        self.lessor = self._shelf = shelf
        self._prefetcher = prefetcher

    def open(self) -> torch.Tensor:
        """Return the padded weight, the newest one; it may be read until ``close``."""
        self.before_read()
        self._shelf.lease()
        try:
            self._prefetcher.used(self._shelf)
        except BaseException:  # an interrupt: nobody will close what was not returned
            self._shelf.release()
            raise
        return self.padded

    def close(self, *, changed: bool = False) -> None:
        """Say that what ``open`` returned was read, or by ``changed`` that it was written to."""
        self._shelf.release(changed=changed)

    def open_to_copy(self) -> torch.Tensor:
        """Return what ``open`` does, to be copied before another unit's is asked for."""
        self.before_read()
        self._prefetcher.open(self._shelf)
        return self.padded

    def copied(self) -> None:
        """Say that what ``open_to_copy`` returned was copied, of all cells of the shelf."""
        self._prefetcher.close(self._shelf)

    @contextmanager
    def opened(self, *, to_change: bool) -> Iterator[None]:
        """Let ``home`` and ``padded`` be read inside, and written where ``to_change``."""
        self.before_read()
        if to_change:
            self.before_write()
        self._shelf.lease(to_change=to_change)
        try:
            yield
        finally:
            self._shelf.release(changed=to_change)


def _at_once() -> None:
    pass
