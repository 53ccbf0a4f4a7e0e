"""Matrices in int8, with a scale in fp32 for each row: weights alone, and inexact.

A weight ``w`` of a row with the scale ``s`` is stored as ``round(w / s)`` and read as that times
``s``: the error is at most ``s / 2``, plus fp32's rounding. ``s`` is the row's largest magnitude
divided by 127.
"""

import torch
from torch import Tensor

_MOST = 127
_BLOCK = 1 << 18
"""Elements whose values are computed at once: 1 MiB in fp32, which a core's cache holds."""
_LEAST = 2.0**-100
"""Rows without a greater magnitude than this are stored as zeros."""


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and the scales of the rows of a finite matrix in fp32."""
    most = values.abs().amax(1)
    # A smaller scale has a half below the magnitudes of rows stored as zeros: the bound would fail.
    scale = torch.where(most > _LEAST, most / _MOST, 2 * most)
    divisor = torch.where(most > _LEAST, scale, torch.inf)
    codes = (values / divisor[:, None]).round_().clamp_(-_MOST, _MOST)
    return codes.to(torch.int8), scale


def dequantize_rows(codes: Tensor, scale: Tensor, into: Tensor) -> None:
    """Compute the values of ``quantize_rows`` in fp32, and round them to the dtype of ``into``."""
    count = max(1, _BLOCK // max(1, codes.shape[1]))
    block = torch.empty((count, codes.shape[1]), device=codes.device)
    factors = torch.split(scale.float().reshape(-1, 1), count)
    for some, factor, target in zip(
        torch.split(codes, count), factors, torch.split(into, count), strict=True
    ):
        values = target if target.dtype == torch.float32 else block[: len(some)]
        values.copy_(some).mul_(factor)  # in place: a new tensor per block has new pages
        if values is not target:
            target.copy_(values)
