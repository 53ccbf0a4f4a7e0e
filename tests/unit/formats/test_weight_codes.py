"""Matrices as codes: in int8 how far they are off at most; in 4 bits as bitsandbytes has them."""

import pytest
import torch

from tensorstow.formats.weight_codes import (
    NF4,
    Blocks,
    dequantize_blocks,
    dequantize_rows,
    dequantize_scales,
    nested_table,
    quantize_blocks,
    quantize_rows,
    quantize_scales,
)

SHAPES = [(64, 128), (7, 64), (5, 44), (3, 21)]


def values_of(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape) * 0.02


def reference(codes: torch.Tensor, scales: torch.Tensor, count: int) -> torch.Tensor:
    """Return the values in fp32, one by one."""
    two = torch.stack([codes >> 4, codes & 15], 1).view(-1)[:count]
    return NF4[two.int()] * scales[torch.arange(count) // 64]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_table_times_the_scales(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    values = values_of(*shape)
    codes, scales = quantize_blocks(values)
    into = torch.empty(shape, dtype=dtype)
    dequantize_blocks(Blocks(codes, scales, NF4), into)
    wanted = reference(codes, scales, values.numel()).view(shape)
    assert torch.equal(into, wanted.to(dtype))
    blocks = torch.arange(values.numel()).view(shape) // 64
    gap = (NF4[1:] - NF4[:-1]).max() / 2  # no code is nearer
    assert ((values - wanted).abs() <= scales[blocks] * (gap + 2**-20)).all()


def test_a_value_between_two_codes_gets_the_nearer_one() -> None:
    values = torch.zeros(64)
    values[0], values[1], values[2] = -2.0, 2 * 0.0795803 + 0.001, 0.079
    codes, scales = quantize_blocks(values)
    assert scales.tolist() == [2.0]
    assert codes[:2].tolist() == [(0 << 4) | 8, (7 << 4) | 7]


@pytest.mark.parametrize("skip", [0, 1, 20, 63])
def test_rows_that_begin_inside_of_a_block(skip: int) -> None:
    values = values_of(700_000)  # several pieces
    codes, scales = quantize_blocks(values)
    whole = reference(codes, scales, values.numel())
    for first, count in ((0, 100), (64, 300_000), (6400, 593_000)):
        into = torch.empty(count, dtype=torch.bfloat16)
        part = Blocks(codes[first // 2 :], scales[first // 64 :], NF4)
        dequantize_blocks(part, into, skip)
        assert torch.equal(into, whole[first + skip : first + skip + count].bfloat16())


def test_scales_are_codes_too() -> None:
    scales = values_of(1000).abs()
    codes, nested = quantize_scales(scales)
    assert codes.dtype == torch.uint8
    whole = dequantize_scales(codes, nested)
    bound = nested.scales[torch.arange(1000) // 256]
    assert ((whole - scales).abs() <= bound * 0.008).all()
    assert torch.equal(dequantize_scales(codes[300:], nested, 300), whole[300:])


def test_nothing_is_divided_by_zero() -> None:
    codes, scales = quantize_blocks(torch.zeros(200))
    into = torch.ones(200)
    dequantize_blocks(Blocks(codes, scales, NF4), into)
    assert not into.any()


def test_a_matrix_without_elements() -> None:
    codes, scales = quantize_blocks(torch.zeros(0))
    dequantize_blocks(Blocks(codes, scales, NF4), torch.zeros(0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitsandbytes_has_the_same(shape: tuple[int, int], dtype: torch.dtype) -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    default = pytest.importorskip("bitsandbytes.backends.default.ops")
    values = values_of(*shape).to(dtype)
    codes, scales = quantize_blocks(values.float())
    theirs, state = bnb.quantize_4bit(values, quant_type="nf4", blocksize=64)
    assert torch.equal(theirs.view(-1), codes)
    assert torch.equal(state.absmax, scales)
    assert torch.equal(state.code, NF4)
    # Their kernel for CPUs takes a row for whole blocks; their reference does not.
    wanted = default._dequantize_4bit_compute(codes, scales, NF4, 64, shape, dtype)
    into = torch.empty(shape, dtype=dtype)
    dequantize_blocks(Blocks(codes, scales, NF4), into)
    assert torch.equal(into, wanted)
    if shape[1] % 64 == 0:
        assert torch.equal(into, bnb.dequantize_4bit(theirs, state))


def test_bitsandbytes_has_the_same_scales() -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    scales = values_of(3000).abs() + 0.01
    codes, nested = quantize_scales(scales)
    assert torch.equal(nested_table(), bnb.create_dynamic_map())
    theirs, state = bnb.quantize_blockwise(scales - scales.mean(), blocksize=256)
    assert torch.equal(state.absmax, nested.scales)
    # Their kernel for CPUs looks codes up in a coarser table: a few are a step off.
    assert (theirs.int() - codes.int()).abs().max() <= 1
    values = bnb.dequantize_blockwise(codes, state) + nested.offset
    assert torch.equal(dequantize_scales(codes, nested), values)


@pytest.mark.parametrize("magnitude", [1e-44, 1e-32, 1e-8, 1.0, 1e30])
def test_a_value_is_half_a_scale_off_at_most(magnitude: float) -> None:
    torch.manual_seed(0)
    w = torch.randn(64, 300) * magnitude
    w[3], w[4, 7] = 0, 5 * magnitude
    codes, scale = quantize_rows(w)
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    found = torch.empty_like(w)
    dequantize_rows(codes, scale, found)
    off = (w.double() - found.double()).abs()
    assert (off <= scale.double()[:, None] * (0.5 + 2**-16)).all()
    assert not found[3].any()
    if magnitude > 1e-30:  # what is less is kept as zeros
        assert torch.allclose(scale, w.abs().amax(1) / 127)
        assert off.max() > 0.4 * scale.max()  # it is no exact format


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pieces_of_rows_are_the_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-127, 128, (5, 700_000), dtype=torch.int8)
    scale, found = torch.rand(5, 1), torch.empty(5, 700_000, dtype=dtype)
    dequantize_rows(codes, scale, found)
    assert torch.equal(found, (codes.float() * scale).to(dtype))


def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 3), (3, 0)):
        dequantize_rows(
            torch.zeros(shape, dtype=torch.int8), torch.ones(shape[0]), torch.ones(shape)
        )
