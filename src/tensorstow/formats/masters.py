"""fp32 masters of bf16 weights, stored as the bits that the weight lacks.

[Note: Split masters] and [Note: 24-bit masters] in csrc/kernels/weights.h, in plain torch.
"""

import torch
from torch import Tensor

_TIE = -0x8000
"""The low half of a master that is exactly halfway between two bf16 numbers."""


def join_halves(weight: Tensor, low: Tensor, rounded_up: Tensor) -> Tensor:
    """Return the fp32 masters of bf16 ``weight`` with the int16 halves ``low``.

    ``rounded_up`` (bool): where a tie was rounded away from zero.
    """
    # As int16 a tie's low half lies below the weight. One that was rounded down lies above it.
    down = (low == _TIE) & ~rounded_up
    return (_high(weight) + low.int() + (down.int() << 16)).view(torch.float32)


def split_halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low half (int16) of each fp32 master, and where it is a tie rounded up."""
    bits = master.view(torch.int32)
    # A tie goes to the even high half: up, if the last bit of its own is set.
    return bits.to(torch.int16), (bits & 0x1FFFF) == 0x18000


def join_bytes(weight: Tensor, low: Tensor) -> Tensor:
    """Return the 24-bit masters (fp32) of bf16 ``weight`` with the int8 distances ``low``."""
    return (_high(weight) + (low.int() << 8)).view(torch.float32)


def split_bytes(master: Tensor) -> Tensor:
    """Return the int8 distance of each fp32 master from its weight."""
    bits = master.view(torch.int32)
    distance = bits - _high(master.bfloat16())
    nearest = (distance + 0x7F + ((distance >> 8) & 1)) >> 8  # a tie to even
    return nearest.clamp(-0x7F, 0x7F).to(torch.int8)


def _high(weight: Tensor) -> Tensor:
    return weight.view(torch.int16).int() << 16
