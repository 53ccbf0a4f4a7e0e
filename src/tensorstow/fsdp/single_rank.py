"""One rank on the CPU: no all-gather; weights and gradients are used in place.

[Note: Single rank] If a parameter is sharded over one rank, FSDP2 still copies each weight
before use and each gradient twice after it. None of that is needed on the CPU in a weight's own
dtype. ``fsdp_post_all_gather`` returns the unsharded weight to FSDP2 and the tensors to free with
it; FSDP2 frees a tensor by resizing its storage to 0. Here it returns the shard's own memory as the
weight, and an ``UnshardedAlias`` to free: resizing that pins and unpins the shard. A forward that
writes to its weight (clamps it, say) writes to the shard itself, which its version counter shows.

[Note: Versions] Memory that is freed so keeps its address: a graph that still needs the weight
would read other bytes, where FSDP2's own storage of 0 bytes raises an error. Autograd compares the
version of what it saved, and the weight has a version counter of its own: another number while it
is freed, the one before when it is unsharded again, and one more for each write in between.
"""

from typing import Any, Self

import torch

from tensorstow.fsdp.shard_storage import ShardStorage
from tensorstow.tensors.placeholder import Placeholder

_FREED = 1 << 20
"""Versions that a freed weight is ahead of what any graph has saved."""
_set_versions: Any = torch._C._autograd._unsafe_set_version_counter  # noqa: SLF001  # as FSDP2 does


class UnshardedAlias(Placeholder):
    """Stand-in for the storage of an unsharded weight; ``resize_(0)`` unpins the shard.

    It has the weight's shape and dtype and no memory.
    """

    _storage: "_AliasStorage"

    @staticmethod
    def __new__(cls: type[Self], shard: ShardStorage) -> Self:
        """Make an alias of ``shard``, which is not pinned yet."""
        tensor = Placeholder.__new__(cls, shard.padded)
        tensor._storage = _AliasStorage(shard)  # noqa: SLF001  # its own
        return tensor

    def untyped_storage(self) -> "_AliasStorage":  # type: ignore[override]
        """Return what FSDP2 resizes."""
        return self._storage

    def pin(self) -> None:
        """Return when the newest weight is in memory, where it stays until FSDP2 frees it."""
        self._storage.resize_(self._storage.nbytes_when_pinned)

    @property
    def weight(self) -> torch.Tensor:
        """The padded weight, to be used while it is pinned."""
        return self._storage.weight


class _AliasStorage:
    """A storage as FSDP2 sees it: all bytes of a weight, or none."""

    def __init__(self, shard: ShardStorage) -> None:
        self._shard = shard
        self._is_pinned = False
        self.weight = shard.padded.data
        """The same memory with another version counter."""
        self._version = 0
        """The weight's version when it was last pinned or unpinned."""
        self._shard_version = shard.padded._version  # noqa: SLF001  # no public way
        """The shard's version when it was last unpinned."""
        self.nbytes_when_pinned = shard.padded.nbytes
        _set_versions((self.weight,), (_FREED,))

    def size(self) -> int:
        """Return the bytes that are in memory for sure."""
        return self.nbytes_when_pinned if self._is_pinned else 0

    def resize_(self, nbytes: int) -> None:
        """Pin the newest weight, or for 0 unpin it."""
        if nbytes and not self._is_pinned:
            padded = self._shard.pin()
            self._version += padded._version - self._shard_version  # noqa: SLF001
            _set_versions((self.weight,), (self._version,))
            self._is_pinned = True
        elif not nbytes and self._is_pinned:
            self._is_pinned = False
            now = self.weight._version  # noqa: SLF001
            is_dirty = now != self._version
            if is_dirty:
                torch.autograd.graph.increment_version(self._shard.padded)
            self._version, self._shard_version = now, self._shard.padded._version  # noqa: SLF001
            _set_versions((self.weight,), (now + _FREED,))
            self._shard.unpin(dirty=is_dirty)


class InPlaceReduceScatter:
    """A reduce-scatter over one rank, for ``set_custom_reduce_scatter``: its result is its input.

    FSDP2 allocates input and output through it, one after the other, and copies one to the other;
    here both are the same tensor.
    """

    def __init__(self) -> None:
        """Begin without a buffer."""
        self._input: torch.Tensor | None = None

    def allocate(
        self, size: torch.Size, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the input of a reduction, or for its output: the same."""
        buffer, self._input = self._input, None
        if buffer is not None and buffer.shape == size and buffer.dtype == dtype:
            return buffer
        self._input = torch.empty(size, dtype=dtype, device=device)
        return self._input

    def reset(self) -> None:
        """Forget a reduction that an exception ended: the next call is for an input."""
        self._input = None

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Refuse to reduce.

        Raises:
            RuntimeError: Always. FSDP2 does not call it over one rank.
        """
        del args, kwargs
        message = "A reduction over several ranks was requested of a reducer of one rank."
        raise RuntimeError(message)
