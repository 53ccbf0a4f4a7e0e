"""Moments in fewer bits than fp32: int8 with a scale for each group.

[Note: Stochastic rounding] in csrc/kernels/moments.h and [Note: Byte moments] in
csrc/kernels/group_loop.h, in plain torch, bit for bit. Where a chance is None a value is rounded
to the nearest.
"""

import torch
from torch import Tensor

GROUP = 32
"""Elements that share a scale."""
_LEAST = 2.0**-149
_LEAST_SCALE = 2.0**-100
_LARGEST_BF16 = 0x7F7F
_LARGEST_ROOT = 0x5F7F
"""The bf16 number whose square is still finite."""


def round_to_bf16(x: Tensor, chance: Tensor | None) -> Tensor:
    """Round fp32 to bf16; ``chance`` is a 16-bit number per element."""
    if chance is None:
        return x.bfloat16()
    bits = x.view(torch.int32)
    # The largest finite number goes to the nearest: by chance it could become infinite.
    added = torch.where((bits & 0x7FFFFFFF) >= _LARGEST_BF16 << 16, 0x8000, chance)
    rounded = ((bits + added) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isnan(), x.bfloat16(), rounded)


def quantize_first(m: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return fp32 first moments as int8 codes and bf16 scales per group."""
    groups = _grouped(m)
    scale = _scale_above(groups, _LARGEST_BF16)
    wide = scale.float()[:, None]
    part = groups.abs() * 0.5  # halves: magnitude + scale may be more than fp32 holds
    t = part / (part + wide * 0.5).clamp(min=_LEAST) * 254.0  # at least: not 0 / 0
    # Codes of a group that is not finite are 0: its scale is NaN, and so are all its values.
    t = t.nan_to_num(0.0) * wide.isfinite()
    low = t.trunc()
    if chance is None:
        up = t - low >= 0.5
    else:
        # With this probability the decoded mean is the moment; so below. No division: it rounds.
        up = _uniform(chance) * (254.0 - t) < (t - low) * (253.0 - low)
    code = (low + up).clamp(max=127.0)
    signed = torch.where(groups.signbit(), -code, code)
    return signed.flatten()[: m.numel()].to(torch.int8), scale


def dequantize_first(code: Tensor, scale: Tensor) -> Tensor:
    """Return the first moments of ``quantize_first``."""
    n = code.float()
    return n / (254.0 - n.abs()) * _spread(scale.float(), n)


def quantize_second(v: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return fp32 second moments as uint8 codes of their roots and bf16 scales per group."""
    # Through float64: torch's float32 square root is not correctly rounded on every CPU.
    root = _grouped(v).double().sqrt().float()
    scale = _scale_above(root, _LARGEST_ROOT)
    wide = scale.float()[:, None]
    # One rounding: torch computes 255.0 / x as 255.0 * (1 / x).
    per_scale = torch.full((), 255.0, device=v.device) / wide.clamp(min=_LEAST_SCALE)
    t = root * per_scale
    t = t.nan_to_num(0.0) * wide.isfinite()
    low = t.trunc()
    if chance is None:
        up = t - low >= 0.5
    else:
        up = _uniform(chance) * (low + low + 1.0) < (t - low) * (t + low)
    # A root that is not zero stays so: eps alone would be a tiny denominator.
    least = ((root > 0.0) & wide.isfinite()).float()
    code = torch.maximum((low + up).clamp(max=255.0), least)
    return code.flatten()[: v.numel()].to(torch.uint8), scale


def dequantize_second(code: Tensor, scale: Tensor) -> Tensor:
    """Return the second moments of ``quantize_second``."""
    n = code.float()
    per_byte = torch.full((), 1.0 / 255.0, device=code.device)
    root = n * _spread(scale.float() * per_byte, n)
    return root * root


def _grouped(x: Tensor) -> Tensor:
    rows = -(-x.numel() // GROUP)
    padded = torch.zeros(rows * GROUP, dtype=torch.float32, device=x.device)
    padded[: x.numel()] = x
    return padded.view(rows, GROUP)


def _scale_above(groups: Tensor, most: int) -> Tensor:
    """Return the least bf16 number that no magnitude of a group exceeds.

    That with the bits ``most`` is the largest; NaN where a magnitude is not finite.
    """
    top = (groups.view(torch.int32) & 0x7FFFFFFF).amax(1)
    up = ((top + 0xFFFF) >> 16).clamp(max=most)  # bits of positive floats are in their order
    bits = torch.where(top >= 0x7F800000, 0x7FC0, up)
    return bits.to(torch.int16).view(torch.bfloat16)


def _spread(scale: Tensor, elements: Tensor) -> Tensor:
    return scale.repeat_interleave(GROUP)[: elements.numel()]


def _uniform(chance: Tensor) -> Tensor:
    """Return numbers between 0 and 1, both excluded, group by group."""
    return (_grouped(chance.float()) + 0.5) * 2.0**-16
