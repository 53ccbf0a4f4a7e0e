"""The squared 2-norms of gradients, wherever they are."""

from collections.abc import Sequence

import torch

import tensorstow._native as _native


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
        each = [
            torch.linalg.vector_norm(g, dtype=torch.float64)
            for i in indices
            if (g := gradients[i]) is not None
        ]
        for index, norm in zip(indices, torch.stack(each).tolist(), strict=True):
            norms[index] = norm * norm
    return norms


def _squared_norm(gradient: torch.Tensor, isa: str | None) -> float:
    flat = gradient.contiguous()
    name = str(flat.dtype).removeprefix("torch.")
    return _native.squared_norm(flat.data_ptr(), flat.numel(), name, isa)
