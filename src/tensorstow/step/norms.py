"""The squared 2-norms of gradients, on any device."""

import math
from collections.abc import Mapping, Sequence

import torch

import tensorstow._native as _native
from tensorstow.io.device_link import CopyQueue, DeviceEvent
from tensorstow.tensors.dtensor import fsum_over_shards, sum_over_shards


class KeptNorms:
    """The squared norms of gradients that are used before the total norm is requested.

    A gradient that is still being copied is held until the copy is complete; nothing waits for it.
    """

    def __init__(self, isa: str | None) -> None:
        """Compute with the instruction set ``isa``; None: the machine's."""
        self._isa = isa
        self._squares: dict[int, float] = {}
        self._away: dict[int, torch.Tensor] = {}
        """Norms, not squared, of gradients on an accelerator: not read yet."""
        self._coming: CopyQueue[tuple[int, torch.Tensor]] = CopyQueue()

    def take(self, number: int, gradient: torch.Tensor, copied: DeviceEvent | None) -> None:
        """Keep the norm of a parameter's gradient, which is complete after ``copied``."""
        if copied is None:
            self._compute(number, gradient)  # now: its update may free its memory
        else:
            self._coming.add((number, gradient), copied)
        for entry in self._coming.pop_complete():
            self._compute(*entry)

    def all(self) -> Mapping[int, float]:
        """Return the squared norms by the parameters' numbers."""
        while self._coming:
            self._compute(*self._coming.pop())
        # Each read waits for the device, so none is made before the norms are needed.
        for number, norm in self._away.items():
            self._squares[number] = norm.item() ** 2
        self._away = {}
        return self._squares

    def clear(self) -> None:
        """Drop all norms: a new step begins."""
        self._squares, self._away = {}, {}
        self._coming.clear()

    def _compute(self, number: int, gradient: torch.Tensor) -> None:
        if gradient.is_cpu:
            self._squares[number] = _squared_norm(gradient, self._isa)
        else:
            self._away[number] = torch.linalg.vector_norm(gradient, dtype=torch.float64)


def squared_norms(gradients: Sequence[torch.Tensor | None], isa: str | None) -> Sequence[float]:
    """Return the squared norm of each; those on an accelerator are copied together."""
    norms = [0.0] * len(gradients)
    away: dict[torch.device, list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if gradient.is_cpu:
            norms[index] = _squared_norm(gradient, isa)
        else:
            away.setdefault(gradient.device, []).append(index)
    for indices in away.values():
        device_norms = [
            torch.linalg.vector_norm(g, dtype=torch.float64)
            for i in indices
            if (g := gradients[i]) is not None
        ]
        for index, norm in zip(indices, torch.stack(device_norms).tolist(), strict=True):
            norms[index] = norm * norm
    return norms


def total_norm(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    isa: str | None,
    known: Mapping[int, float],
) -> torch.Tensor:
    """Return the norm of all ranks' gradients; ``known``: squared norms of some, by index."""
    computed = enumerate(squared_norms(gradients, isa))
    squares = sum_over_shards(parameters, [known.get(i, square) for i, square in computed])
    # math.sqrt is correctly rounded everywhere; torch's is an ulp off on some machines.
    return torch.tensor(math.sqrt(sum(squares)), dtype=torch.float64)


def exact_total_norm(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], isa: str | None
) -> torch.Tensor:
    """Return the norm of all ranks' gradients, whose bits do not depend on the number of ranks.

    Rows are not cut among ranks: each one's square is summed in one order, and the sum over all
    rows is rounded once.
    """
    squares = [[] if g is None else _squares_of_rows(g, isa) for g in gradients]
    return torch.tensor(math.sqrt(fsum_over_shards(parameters, squares)), dtype=torch.float64)


def _squares_of_rows(gradient: torch.Tensor, isa: str | None) -> list[float]:
    whole = gradient.cpu().contiguous()
    rows = whole.shape[0] if whole.ndim else 1
    name = str(whole.dtype).removeprefix("torch.")
    columns = whole.numel() // max(1, rows)
    return _native.squared_norms(whole.data_ptr(), rows, columns, name, isa)


def _squared_norm(gradient: torch.Tensor, isa: str | None) -> float:
    flat = gradient.contiguous()
    name = str(flat.dtype).removeprefix("torch.")
    return _native.squared_norm(flat.data_ptr(), flat.numel(), name, isa)
