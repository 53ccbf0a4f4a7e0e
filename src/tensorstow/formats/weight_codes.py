"""Matrices as codes and scales: in int8 by rows, and in 4 bits as bitsandbytes has them.

In int8 a weight ``w`` of a row with the scale ``s`` is stored as ``round(w / s)`` and read as that
times ``s``: the error is at most ``s / 2``, plus fp32's rounding. ``s`` is the row's largest
magnitude divided by 127.

The table of NF4 has 16 values between -1 and 1. An element is the value of its code times the scale
of its block, in fp32, rounded once to the dtype that is asked for. A block is 64 elements that
follow each other in the order of memory, and its scale is the largest magnitude in it. Two codes
share a byte, the first one in the high bits.

[Note: Nested scales] With double quantization the scales less their mean (the *offset*) are codes
of a table of 256 values, in blocks of 256 scales. Files have both tables. Everything is as of
bitsandbytes, bit for bit.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 64
"""Elements with one scale."""
NESTED_BLOCK = 256
"""Scales with one scale of their own."""
_PIECE = 1 << 18
"""Elements whose values are computed at once: 1 MiB in fp32, which a core's cache holds."""
_LEAST = 1e-38
"""Scales below it are not divided by."""
_MOST = 127
_LEAST_OF_ROW = 2.0**-100
"""Rows without a greater magnitude than this are stored as zeros."""
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""The table of QLoRA's paper."""


@dataclass(frozen=True, eq=False, slots=True)
class NestedScales:
    """What scales are computed from, beside their codes; all in fp32."""

    scales: Tensor
    """One for each block of codes."""
    table: Tensor
    offset: float
    block: int = NESTED_BLOCK


@cache
def nested_table() -> Tensor:
    """Return the 256 values for codes of scales, ascending: bitsandbytes' dynamic map."""
    values = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, device="cpu")
        means = (edges[:-1] + edges[1:]) / 2.0
        values += ((10 ** (power - 6)) * means).tolist()
        values += (-(10 ** (power - 6)) * means).tolist()
    return torch.tensor(sorted(values), device="cpu")


def quantize_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return NF4 codes, two in a byte, and the scales of the blocks of finite values in fp32."""
    codes, scales = _quantize(values, NF4, BLOCK)
    if codes.numel() % 2:
        codes = torch.nn.functional.pad(codes, (0, 1), value=NF4.tolist().index(0.0))
    return (codes[::2] << 4) | codes[1::2], scales


def quantize_scales(scales: Tensor) -> tuple[Tensor, NestedScales]:
    """Return codes of the scales of a whole matrix, and what gives their values."""
    offset, table = scales.mean(), nested_table()
    codes, nested = _quantize(scales - offset, table, NESTED_BLOCK)
    return codes, NestedScales(nested, table, offset.item())


def dequantize_scales(codes: Tensor, nested: NestedScales, first: int = 0) -> Tensor:
    """Return the scales of blocks in fp32; ``codes`` begin with that of block ``first``."""
    at = torch.arange(first, first + codes.numel(), device="cpu") // nested.block
    values = nested.table[codes.reshape(-1).int()] * nested.scales[at]
    return values + nested.offset


@dataclass(frozen=True, eq=False, slots=True)
class Blocks:
    """Whole blocks of a matrix, which follow each other; the last one of the matrix may be short.

    Codes of a table, two in a byte, and the scales of the blocks in fp32.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor
    block: int = BLOCK


def dequantize_blocks(blocks: Blocks, into: Tensor, skip: int = 0) -> None:
    """Compute the values of blocks from element ``skip`` on, rounded to the dtype of ``into``."""
    table = blocks.table.float()
    # Both values of each byte, as one int64: one look-up decodes two elements.
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1).view(torch.int64)
    codes, target, done = blocks.codes.reshape(-1), into.view(-1), 0
    count = max(1, _PIECE // blocks.block) * blocks.block
    total = skip + target.numel()
    for first in range(0, total, count):
        stop = min(first + count, total)
        two = torch.index_select(pairs.view(-1), 0, codes[first // 2 : (stop + 1) // 2].int())
        values = two.view(torch.float32)[: stop - first]
        _scale(values, blocks.scales[first // blocks.block :], blocks.block)
        some = values[max(0, skip - first) :]
        target[done : done + some.numel()].copy_(some)
        done += some.numel()


def _scale(values: Tensor, scales: Tensor, block: int) -> None:
    """Multiply blocks by their scales, in place."""
    whole = values.numel() // block
    values[: whole * block].view(-1, block).mul_(scales[:whole, None])
    if values.numel() > whole * block:
        values[whole * block :].mul_(scales[whole])


def _quantize(values: Tensor, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the codes of the nearest values of an ascending table, and the blocks' scales."""
    flat = values.reshape(-1)
    count = -(-flat.numel() // block)
    padded = torch.nn.functional.pad(flat, (0, count * block - flat.numel())).view(count, block)
    scales = padded.abs().amax(1)
    factors = 1.0 / scales.clamp(min=_LEAST)
    nearest = torch.bucketize(
        (padded * factors[:, None]).clamp_(-1, 1), (table[:-1] + table[1:]) / 2, out_int32=True
    )
    return nearest.to(torch.uint8).view(-1)[: flat.numel()], scales


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and the scales of the rows of a finite matrix in fp32."""
    most = values.abs().amax(1)
    # A smaller scale has a half below the magnitudes of rows stored as zeros: the bound would fail.
    scale = torch.where(most > _LEAST_OF_ROW, most / _MOST, 2 * most)
    divisor = torch.where(most > _LEAST_OF_ROW, scale, torch.inf)
    codes = (values / divisor[:, None]).round_().clamp_(-_MOST, _MOST)
    return codes.to(torch.int8), scale


def dequantize_rows(codes: Tensor, scale: Tensor, into: Tensor) -> None:
    """Compute the values of ``quantize_rows`` in fp32, and round them to the dtype of ``into``."""
    count = max(1, _PIECE // max(1, codes.shape[1]))
    block = torch.empty((count, codes.shape[1]), device=codes.device)
    factors = torch.split(scale.float().reshape(-1, 1), count)
    for some, factor, target in zip(
        torch.split(codes, count), factors, torch.split(into, count), strict=True
    ):
        values = target if target.dtype == torch.float32 else block[: len(some)]
        values.copy_(some).mul_(factor)  # in place: a new tensor per block has new pages
        if values is not target:
            target.copy_(values)
