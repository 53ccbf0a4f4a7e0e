"""One rank on the CPU: weights are computed with where they live, gradients stay where they are.

[Note: One rank] Where a parameter is cut among one rank, FSDP2 still copies each weight into memory
of its own before use and each gradient twice behind it. None of the copies is needed on the CPU in
a weight's own dtype. FSDP2 asks what it gathers for the gathered weight, and frees that by resizing
its storage to nothing: a tenure is what it frees here, and the weight's own memory is what it gets.
So a weight on disk is lent its memory from gathering to freeing, and nothing besides. A forward
that writes to its weight (clamps it, say) writes to the weight itself: its version tells that it
did.

[Note: Versions] What is freed here keeps its addresses, so a graph that still needs a weight then
would read other bytes, where FSDP2's own storage of no bytes is an error. Autograd compares the
version of what it saved, and the gathered weight counts versions of its own: another number while
it is freed, the one before when it is gathered again, and one more for each write in between.
"""

from typing import Any, Self

import torch

from tensorstow.fsdp.shard_storage import Cell
from tensorstow.tensors.placeholder import StandIn

_FREED = 1 << 20
"""Versions that a freed weight is ahead of what any graph has saved."""
_set_versions: Any = torch._C._autograd._unsafe_set_version_counter  # noqa: SLF001  # as FSDP2 does


class Tenure(StandIn):
    """What FSDP2 takes for the memory of a gathered weight; to free it ends the cell's reading.

    It has the weight's shape and dtype and no memory.
    """

    _storage: "_Reading"

    @staticmethod
    def __new__(cls: type[Self], cell: Cell) -> Self:
        """Stand for the memory of ``cell``, which is not being read yet."""
        tensor = StandIn.__new__(cls, cell.padded)
        tensor._storage = _Reading(cell)  # noqa: SLF001  # its own
        return tensor

    def untyped_storage(self) -> "_Reading":  # type: ignore[override]
        """Return what FSDP2 resizes."""
        return self._storage

    def begin(self) -> None:
        """Return when the newest weight is there; it may be read until FSDP2 frees it."""
        self._storage.resize_(self._storage.whole)

    @property
    def weight(self) -> torch.Tensor:
        """The weight, padded, to be used while it is read."""
        return self._storage.weight


class _Reading:
    """A storage as FSDP2 sees it, of all of a weight's bytes or of none."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._is_open = False
        self.weight = cell.padded.data
        """The same memory, and another version counter."""
        self._version = 0
        """Of the weight when its reading began, or ended."""
        self._home_version = cell.padded._version  # noqa: SLF001  # nothing public tells
        """Of the cell's own when the last reading ended."""
        self.whole = cell.padded.nbytes
        _set_versions((self.weight,), (_FREED,))

    def size(self) -> int:
        """Return the bytes that are there."""
        return self.whole if self._is_open else 0

    def resize_(self, nbytes: int) -> None:
        """Begin to read the weight, the newest one, or end with it."""
        if nbytes and not self._is_open:
            home = self._cell.open()
            self._version += home._version - self._home_version  # noqa: SLF001
            _set_versions((self.weight,), (self._version,))
            self._is_open = True
        elif not nbytes and self._is_open:
            self._is_open = False
            now = self.weight._version  # noqa: SLF001
            changed = now != self._version
            if changed:
                torch.autograd.graph.increment_version(self._cell.padded)
            self._version, self._home_version = now, self._cell.padded._version  # noqa: SLF001
            _set_versions((self.weight,), (now + _FREED,))
            self._cell.close(changed=changed)


class ReduceInPlace:
    """A reduce-scatter over one rank, whose result is its input: no copy is made.

    FSDP2 asks it for the memory of both, one after the other, and copies the one to the other,
    which for one tensor is nothing.
    """

    def __init__(self) -> None:
        """Have given nothing yet."""
        self._given: torch.Tensor | None = None

    def allocate(
        self, size: torch.Size, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the input of a reduction, or its output: the same."""
        given, self._given = self._given, None
        if given is not None and given.shape == size and given.dtype == dtype:
            return given
        self._given = torch.empty(size, dtype=dtype, device=device)
        return self._given

    def forget(self) -> None:
        """Forget a reduction that an exception ended: the next call is for an input."""
        self._given = None

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Raise RuntimeError: over one rank FSDP2 does not call it."""
        del args, kwargs
        message = "A reduction over several ranks was asked of one that is over one rank."
        raise RuntimeError(message)
