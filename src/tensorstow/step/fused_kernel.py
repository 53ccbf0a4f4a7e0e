"""The update rule as one Triton kernel: one launch per chunk, in any state format.

[Note: The fused kernel] It is ``adam_reference_in_format`` again, operation by operation: decode,
update, encode, with each intermediate in a register. The bits are the reference's, so

* no multiplication and addition are fused: ``enable_fp_fusion=False`` tells the compiler and ptxas;
  the average's are, in float64 as in the reference;
* quotients and roots are ``tl.div_rn`` and ``tl.sqrt_rn``: ``/`` and ``tl.sqrt`` approximate;
* no function of libdevice is called: Triton lets those flush denormals;
* bf16 is rounded by integer operations, so that its NaN has the host's bits too.

A table in device memory describes a chunk, with a row for each ``SegmentUpdate``: the addresses of
its weight and gradient, and its scalars. A program of the launch updates ``BLOCK`` elements
of one segment. Groups that share a scale are rows of its tile.

Only ``tensorstow.step.update_rule`` imports this module, because Triton is optional.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tensorstow.formats.quantize import GROUP
from tensorstow.formats.stochastic_rounding import key_words
from tensorstow.io.device_link import Pairs
from tensorstow.states.layout import STREAMS, Family
from tensorstow.step.segment_update import SegmentUpdate, Update

BLOCK = 1024
"""Elements that a program updates; a multiple of GROUP."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Options of a launch, and of a compilation ahead of it."""
COLUMNS = (
    "first_block",
    "count",
    "position",
    "weight",
    "gradient",
    "gradient_kind",
    "first",
    "seed_master",
    "before",
    "inside",
)
"""The table's integers, 8 bytes each; its second part has each segment's ``AdamScalars``."""
_SCALARS = 10
_ROW_BYTES = 8 * len(COLUMNS) + 4 * _SCALARS
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the dtypes of gradients, which may differ within a chunk."""


class FusedRule:
    """The kernel as an update rule: one launch for all segments of a chunk."""

    name = "one fused kernel"

    def table_bytes(self, segments: int) -> int:
        """Return the bytes of the kernel's table."""
        return table_bytes(segments)

    def prepare(
        self, segments: Sequence[SegmentUpdate], family: Family, on_host: Tensor, on_device: Tensor
    ) -> tuple[Pairs, Update]:
        """Write the table; return its copy and the launch."""
        blocks = fill_table(segments, on_host)

        def launch(streams: Sequence[Tensor]) -> None:
            if blocks:
                update(on_device, len(segments), blocks, streams, family)

        return [(on_device, on_host)], launch


def table_bytes(segments: int) -> int:
    """Return the bytes of a table for this number of segments."""
    return segments * _ROW_BYTES


def fill_table(segments: Sequence[SegmentUpdate], out: Tensor) -> int:
    """Write the table of ``segments`` to ``out``, bytes in host memory; return its blocks.

    One program updates one block, so this is the number of programs to launch.
    """
    count = len(segments)
    rows = out.numpy()
    integers = rows[: 8 * len(COLUMNS) * count].view(np.int64).reshape(count, len(COLUMNS))
    scalars = rows[integers.nbytes :][: 4 * _SCALARS * count].view(np.float32)
    blocks = 0
    for row, segment in zip(integers, segments, strict=True):
        row[:8] = (
            blocks,
            segment.weight.numel(),
            segment.position,
            segment.weight.data_ptr(),
            segment.gradient.data_ptr(),
            _KINDS[segment.gradient.dtype],
            segment.first,
            segment.seed_master,
        )
        # The host mixes the key, once for each segment.
        row[8:] = key_words(segment.key)
        blocks += triton.cdiv(segment.weight.numel(), BLOCK)
    scalars.reshape(count, _SCALARS)[:] = [segment.scalars for segment in segments]
    return blocks


def update(
    table: Tensor,
    segments: int,
    blocks: int,
    streams: Sequence[Tensor],
    family: Family,
) -> None:
    """Update the segments of ``table`` and their ``streams`` in place, on the current stream.

    ``fill_table`` wrote the table, which is on the device, and returned its ``blocks``.
    """
    integers = table[: segments * 8 * len(COLUMNS)].view(torch.int64)
    scalars = table[integers.nbytes : table_bytes(segments)].view(torch.float32)
    named = {spec.name: _words(s) for spec, s in zip(family.specs, streams, strict=True)}
    pointers = [named.get(name, integers) for name in STREAMS]  # an absent one is not read
    with torch.cuda.device_of(table):  # type: ignore[no-untyped-call]  # nothing, on the CPU
        update_chunk[(blocks,)](
            integers,
            scalars,
            segments,
            *pointers,
            DTYPE=str(family.dtype),
            FORMAT=str(family.format),
            AMSGRAD=family.amsgrad,
            EMA=family.ema,
            **OPTIONS,
        )


def _words(stream: Tensor) -> Tensor:
    """Return a bf16 stream as integers, which the kernel converts itself."""
    return stream.view(torch.int16) if stream.dtype == torch.bfloat16 else stream


# --- on the device ---

_GROUP = tl.constexpr(GROUP)
_BLOCK = tl.constexpr(BLOCK)
_ROWS = tl.constexpr(BLOCK // GROUP)
_WIDTH = tl.constexpr(len(COLUMNS))
_LENGTH = tl.constexpr(_SCALARS)
_NAN = tl.constexpr(0x7FC0)
_INFINITY = tl.constexpr(0x7F800000)
_LARGEST_BF16 = tl.constexpr(0x7F7F)
# The largest bf16 number whose square is finite.
_LARGEST_ROOT = tl.constexpr(0x5F7F)


# Triton would compile again for numbers of segments that are 1 or multiples of 16.
@triton.jit(do_not_specialize=["segments"])
def update_chunk(
    integers: tl.tensor,
    scalars: tl.tensor,
    segments: tl.tensor,
    m_at: tl.tensor,
    v_at: tl.tensor,
    vmax_at: tl.tensor,
    master_at: tl.tensor,
    m_scale_at: tl.tensor,
    v_scale_at: tl.tensor,
    ema_at: tl.tensor,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    AMSGRAD: tl.constexpr,
    EMA: tl.constexpr,
) -> None:
    """Update one block of one segment."""
    # Find the block's segment, and its places in the parameter and in the chunk's streams.
    block = tl.program_id(0)
    segment = _segment_of(block, integers, segments)
    row = integers + segment * _WIDTH
    begin = (block - tl.load(row)) * _BLOCK
    count = tl.load(row + 1)
    position = tl.load(row + 2) + begin
    weight_at = tl.load(row + 3)
    inside = tl.arange(0, _ROWS)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    at = begin + inside
    mask = at < count
    state_at = position + inside
    group = position // _GROUP + tl.arange(0, _ROWS)
    group_mask = begin + tl.arange(0, _ROWS) * _GROUP < count

    # Read what the update needs, and decode it to fp32.
    m_scale = m_scale_at + group
    v_scale = v_scale_at + group
    m, v, ties_up = _decode_moments(
        m_at + state_at, v_at + state_at, m_scale, v_scale, mask, group_mask, DTYPE, FORMAT
    )
    weight = _load_weight(weight_at, at, mask, DTYPE)
    if DTYPE != "torch.float32":
        master = _decode_master(weight, master_at + state_at, ties_up, mask, DTYPE, FORMAT)
        weight = tl.where(tl.load(row + 7) != 0, weight, master)
    # A value is needed in any case; without amsgrad the update does not look at it.
    vmax = v
    if AMSGRAD:
        vmax = tl.load(vmax_at + state_at, mask=mask, other=0.0)
    gradient = _load_gradient(tl.load(row + 4), tl.load(row + 5), at, mask)

    weight, m, v, vmax = _adam(weight, m, v, vmax, gradient, scalars + segment * _LENGTH, AMSGRAD)

    # Encode and store what the update has changed.
    if AMSGRAD:
        tl.store(vmax_at + state_at, vmax, mask=mask)
    if EMA:
        average = tl.load(ema_at + state_at, mask=mask, other=0.0)
        by = tl.load(scalars + segment * _LENGTH + 9)
        tl.store(ema_at + state_at, _average(average, weight, by), mask=mask)
    if DTYPE != "torch.float32":
        _store_master(weight, master_at + state_at, mask, DTYPE, FORMAT)
    # Exact formats read no random bits, but the call below takes some.
    bits = at
    if FORMAT == "bf16" or FORMAT == "int8":
        words = row + 8
        bits = _random_bits(tl.load(row + 6) + at, tl.load(words), tl.load(words + 1))
    _store_moments(
        m,
        _signed(v, weight, DTYPE, FORMAT),
        bits,
        m_at + state_at,
        v_at + state_at,
        m_scale,
        v_scale,
        mask,
        group_mask,
        FORMAT,
    )
    _store_weight(weight, weight_at, at, mask, DTYPE)


@triton.jit
def _segment_of(block: tl.tensor, integers: tl.tensor, segments: tl.tensor) -> tl.tensor:
    """Return the last segment whose first block is at or before ``block``."""
    low = 0
    high = segments - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(integers + middle * _WIDTH) <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _adam(
    weight: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    vmax: tl.tensor,
    gradient: tl.tensor,
    scalars: tl.tensor,
    AMSGRAD: tl.constexpr,
) -> tl.tuple:
    """Compute ``adam_reference``; ``scalars`` are in the order of AdamScalars."""
    beta1_weight = tl.load(scalars)
    beta2 = tl.load(scalars + 1)
    beta2_weight = tl.load(scalars + 2)
    decay = tl.load(scalars + 3)
    l2 = tl.load(scalars + 4)
    step_size = tl.load(scalars + 5)
    denom_scale = tl.load(scalars + 6)
    eps = tl.load(scalars + 7)
    g = gradient * tl.load(scalars + 8)
    if l2 != 0.0:
        g = g + weight * l2
    # Begin at the nearer end, so that a weight of 1 gives the gradient itself.
    if beta1_weight >= 0.5:
        m = g + (g - m) * (beta1_weight - 1.0)
    else:
        m = m + (g - m) * beta1_weight
    v = v * beta2 + (g * beta2_weight) * g
    u = v
    if AMSGRAD:
        # NaN stays, as by torch.maximum.
        u = tl.where((vmax > v) | (vmax != vmax), vmax, v)
    denominator = tl.sqrt_rn(u) * denom_scale + eps
    weight = weight * decay - tl.div_rn(m * step_size, denominator)
    return weight, m, v, u


@triton.jit
def _average(average: tl.tensor, weight: tl.tensor, by: tl.tensor) -> tl.tensor:
    """Compute ``formats.reference``'s average: an fma, rounded once by way of float64."""
    difference = weight - average
    base = average
    pull = by
    if by >= 0.5:
        base = weight
        pull = by - 1.0
    # The product of two fp32 numbers is exact in float64.
    product = difference.to(tl.float64) * pull.to(tl.float64)
    added = base.to(tl.float64)
    total = product + added
    # The error of the sum, which is exact too (Knuth's two-sum).
    back = total - product
    error = (product - (total - back)) + (added - back)
    bits = total.to(tl.int64, bitcast=True)
    towards = tl.where((error > 0.0) == (total > 0.0), 1, -1)
    inexact_even = (tl.abs(error) > 0.0) & ((bits & 1) == 0)
    # Round to odd, so that fp32 is not decided by a number that was rounded to its midpoint.
    odd = tl.where(inexact_even, bits + towards, bits).to(tl.float64, bitcast=True)
    # A weight of 1 copies, also over an average that is not finite.
    return tl.where(by == 1.0, weight, odd.to(tl.float32))


# --- weights and gradients: at the addresses in the table ---


@triton.jit
def _load_weight(
    address: tl.tensor, at: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr
) -> tl.tensor:
    if DTYPE == "torch.bfloat16":
        half = tl.load(address.to(tl.pointer_type(tl.int16)) + at, mask=mask, other=0)
        weight = _from_bf16(half)
    elif DTYPE == "torch.float16":
        half = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0)
        weight = half.to(tl.float32)
    else:
        weight = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)
    return weight


@triton.jit
def _load_gradient(
    address: tl.tensor, kind: tl.tensor, at: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    if kind == 1:
        gradient = _load_weight(address, at, mask, "torch.bfloat16")
    elif kind == 2:
        gradient = _load_weight(address, at, mask, "torch.float16")
    else:
        gradient = _load_weight(address, at, mask, "torch.float32")
    return gradient


@triton.jit
def _store_weight(
    weight: tl.tensor,
    address: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    DTYPE: tl.constexpr,
) -> None:
    if DTYPE == "torch.bfloat16":
        tl.store(address.to(tl.pointer_type(tl.int16)) + at, _to_bf16(weight), mask=mask)
    elif DTYPE == "torch.float16":
        half = weight.to(tl.float16)
        tl.store(address.to(tl.pointer_type(tl.float16)) + at, half, mask=mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.float32)) + at, weight, mask=mask)


# --- masters: ``formats.state_format`` ---


@triton.jit
def _decode_master(
    weight: tl.tensor,
    at: tl.tensor,
    ties_up: tl.tensor,
    mask: tl.tensor,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    state = tl.load(at, mask=mask, other=0)
    if DTYPE == "torch.float16" or FORMAT == "fp32":
        master = state
    elif FORMAT == "int8":
        master = _float(_bits(weight) + (state.to(tl.int32) << 8))
    else:
        # As int16 a tie's low half lies below the weight. One that was rounded down lies above it.
        down = (state == -0x8000) & (~ties_up)
        master = _float(_bits(weight) + state.to(tl.int32) + (down.to(tl.int32) << 16))
    return master


@triton.jit
def _store_master(
    master: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    bits = _bits(master)
    if DTYPE == "torch.float16" or FORMAT == "fp32":
        tl.store(at, master, mask=mask)
    elif FORMAT == "int8":
        distance = bits - (_to_bf16(master).to(tl.int32) << 16)
        # A tie goes to the even byte.
        nearest = (distance + 0x7F + ((distance >> 8) & 1)) >> 8
        nearest = tl.minimum(tl.maximum(nearest, -0x7F), 0x7F)
        tl.store(at, nearest.to(tl.int8), mask=mask)
    else:
        tl.store(at, bits.to(tl.int16), mask=mask)


@triton.jit
def _signed(
    v: tl.tensor, master: tl.tensor, DTYPE: tl.constexpr, FORMAT: tl.constexpr
) -> tl.tensor:
    """Return second moments without the signs that store how ties were rounded."""
    if FORMAT == "bf16" or (FORMAT == "split" and DTYPE == "torch.bfloat16"):
        v = tl.abs(v)
        if DTYPE == "torch.bfloat16":
            # A tie goes to the even high half: up, if the last bit of its own is set.
            v = tl.where((_bits(master) & 0x1FFFF) == 0x18000, -v, v)
    return v


# --- moments: ``formats.quantize`` ---


@triton.jit
def _decode_moments(
    m_at: tl.tensor,
    v_at: tl.tensor,
    m_scale_at: tl.tensor,
    v_scale_at: tl.tensor,
    mask: tl.tensor,
    group_mask: tl.tensor,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tuple:
    """Return both moments, and a mask of the split masters whose tie was rounded up."""
    m = tl.load(m_at, mask=mask, other=0)
    v = tl.load(v_at, mask=mask, other=0)
    if FORMAT == "int8":
        n = m.to(tl.float32)
        scale = _from_bf16(tl.load(m_scale_at, mask=group_mask, other=0))[:, None]
        m = tl.div_rn(n, 254.0 - tl.abs(n)) * scale
        scale = _from_bf16(tl.load(v_scale_at, mask=group_mask, other=0))[:, None]
        root = v.to(tl.float32) * (scale * (1.0 / 255.0))
        v = root * root
    elif FORMAT == "bf16":
        m = _from_bf16(m)
        v = _from_bf16(v)
    # The sign of a second moment stores how its master's tie was rounded.
    ties_up = _bits(v) < 0
    if FORMAT == "bf16" or (FORMAT == "split" and DTYPE == "torch.bfloat16"):
        v = tl.abs(v)
    return m, v, ties_up


@triton.jit
def _store_moments(
    m: tl.tensor,
    v: tl.tensor,
    bits: tl.tensor,
    m_at: tl.tensor,
    v_at: tl.tensor,
    m_scale_at: tl.tensor,
    v_scale_at: tl.tensor,
    mask: tl.tensor,
    group_mask: tl.tensor,
    FORMAT: tl.constexpr,
) -> None:
    """Store moments; the sign of ``v`` is kept if the format has one."""
    if FORMAT == "int8":
        # Padding after a parameter's last element must not change its group's scale.
        code, scale = _to_bytes(tl.where(mask, m, 0.0), _low_half(bits))
        tl.store(m_at, code, mask=mask)
        tl.store(m_scale_at, scale, mask=group_mask)
        code, scale = _to_unsigned_bytes(tl.where(mask, tl.abs(v), 0.0), _high_half(bits))
        tl.store(v_at, code, mask=mask)
        tl.store(v_scale_at, scale, mask=group_mask)
    elif FORMAT == "bf16":
        tl.store(m_at, _to_bf16_by_chance(m, _low_half(bits)), mask=mask)
        tl.store(v_at, _to_bf16_by_chance(v, _high_half(bits)), mask=mask)
    else:
        tl.store(m_at, m, mask=mask)
        tl.store(v_at, v, mask=mask)


@triton.jit
def _low_half(bits: tl.tensor) -> tl.tensor:
    return (bits & 0xFFFF).to(tl.int32)


@triton.jit
def _high_half(bits: tl.tensor) -> tl.tensor:
    return (bits >> 16).to(tl.int32)


@triton.jit
def _to_bytes(m: tl.tensor, draw: tl.tensor) -> tl.tuple:
    scale = _scale_above(m, _LARGEST_BF16)
    wide = _from_bf16(scale)[:, None]
    # Halves: magnitude and scale together may be more than fp32 holds.
    part = tl.abs(m) * 0.5
    # The least positive number keeps the quotient from being 0 / 0.
    least = _float(tl.full([1, 1], 1, tl.int32))
    t = tl.div_rn(part, tl.maximum(part + wide * 0.5, least)) * 254.0
    # The scale of a group with a magnitude that is not finite is NaN.
    t = tl.where(wide == wide, t, 0.0)
    low = t.to(tl.int32).to(tl.float32)
    # With this probability the decoded mean is the moment; a division would round.
    up = _uniform(draw) * (254.0 - t) < (t - low) * (253.0 - low)
    code = tl.minimum(low + up.to(tl.float32), 127.0).to(tl.int32)
    code = tl.where(_bits(m) < 0, -code, code)
    return code.to(tl.int8), scale


@triton.jit
def _to_unsigned_bytes(v: tl.tensor, draw: tl.tensor) -> tl.tuple:
    root = tl.sqrt_rn(v)
    scale = _scale_above(root, _LARGEST_ROOT)
    wide = _from_bf16(scale)[:, None]
    per_scale = tl.div_rn(tl.full([_ROWS, 1], 255.0, tl.float32), tl.maximum(wide, 2.0**-100))
    t = tl.where(wide == wide, root * per_scale, 0.0)
    low = t.to(tl.int32).to(tl.float32)
    up = _uniform(draw) * (low + low + 1.0) < (t - low) * (t + low)
    # A root that is not zero stays so: eps alone would be a tiny denominator.
    least = ((root > 0.0) & (wide == wide)).to(tl.float32)
    code = tl.maximum(tl.minimum(low + up.to(tl.float32), 255.0), least)
    return code.to(tl.int32).to(tl.uint8), scale


@triton.jit
def _scale_above(x: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    top = tl.max(_bits(x) & 0x7FFFFFFF, axis=1)
    # Bits of positive floats are in their order, so this rounds up to bf16.
    up = tl.minimum((top + 0xFFFF) >> 16, MOST)
    return tl.where(top >= _INFINITY, _NAN, up).to(tl.int16)


@triton.jit
def _random_bits(index: tl.tensor, before: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return 32 random bits for each element; ``formats.stochastic_rounding``."""
    x = index.to(tl.uint32) ^ before.to(tl.uint32)
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11)) + inside.to(tl.uint32)
    x = x * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _uniform(draw: tl.tensor) -> tl.tensor:
    return (draw.to(tl.float32) + 0.5) * (1.0 / 65536.0)


# --- bits ---


@triton.jit
def _bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _from_bf16(half: tl.tensor) -> tl.tensor:
    return _float(half.to(tl.int32) << 16)


@triton.jit
def _to_bf16(x: tl.tensor) -> tl.tensor:
    """Round to the nearest, ties to even."""
    bits = _bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, _NAN, rounded).to(tl.int16)


@triton.jit
def _to_bf16_by_chance(x: tl.tensor, draw: tl.tensor) -> tl.tensor:
    bits = _bits(x)
    # The largest finite number goes to the nearest: by chance it could become infinite.
    added = tl.where((bits & 0x7FFFFFFF) >= (_LARGEST_BF16 << 16), 0x8000, draw)
    return tl.where(x != x, _NAN, (bits + added) >> 16).to(tl.int16)
