"""One rank on the CPU: weights are computed with where they live, gradients stay where they are.

[Note: One rank] Where a parameter is cut among one rank, FSDP2 still copies each weight into memory
of its own before use and each gradient twice behind it. None of the copies is needed on the CPU in
a weight's own dtype. FSDP2 asks what it gathers for the gathered weight, and frees that by resizing
its storage to nothing: a tenure is what it frees here, and the weight's own memory is what it gets.
So a weight on disk is lent its memory from gathering to freeing, and nothing besides. A forward
that writes to its weight (clamps it, say) writes to the weight itself: its version tells that it
did.
"""

from typing import Self

import torch

from tensorstow.engine.cells import Cell
from tensorstow.optim.stand_ins import StandIn


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


class _Reading:
    """A storage as FSDP2 sees it, of all of a weight's bytes or of none."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._is_open = False
        self._version = 0
        """Of the weight when its reading began."""
        self.whole = cell.padded.nbytes

    def size(self) -> int:
        """Return the bytes that are there."""
        return self.whole if self._is_open else 0

    def resize_(self, nbytes: int) -> None:
        """Begin to read the weight, the newest one, or end with it."""
        if nbytes and not self._is_open:
            self._version = self._cell.open()._version  # noqa: SLF001  # nothing public tells
            self._is_open = True
        elif not nbytes and self._is_open:
            self._is_open = False
            self._cell.close(changed=self._cell.padded._version != self._version)  # noqa: SLF001


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
