"""Moments in fewer bits: right on average, never frozen, and nothing bad hidden."""

import math

import pytest
import torch
from torch import Tensor

from tensorstow.formats.quantize import (
    GROUP,
    dequantize_first,
    dequantize_second,
    quantize_first,
    quantize_second,
    round_to_bf16,
)
from tensorstow.formats.stochastic_rounding import random_bits

KEYS = 2000


def mean_over_keys(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the mean of what ``x`` becomes under KEYS keys, and the mean's standard error."""
    total, square = torch.zeros(x.numel()).double(), torch.zeros(x.numel()).double()
    for key in range(KEYS):
        m, v = random_bits(key, 0, x.numel())
        if kind == "half":
            back = round_to_bf16(x, m).float()
        elif kind == "m":
            back = dequantize_first(*quantize_first(x, m))
        else:
            back = dequantize_second(*quantize_second(x, v))
        error = back.double() - x.double()
        total += error
        square += error * error
    return total / KEYS, (square / KEYS).sqrt() / math.sqrt(KEYS)


def log_uniform(n: int, low: float, high: float) -> Tensor:
    random = torch.Generator().manual_seed(4)
    return 10.0 ** torch.empty(n).uniform_(low, high, generator=random)


@pytest.mark.parametrize("kind", ["half", "m", "v"])
def test_the_mean_is_the_value(kind: str) -> None:
    x = log_uniform(1024, -10, -9) * (1 if kind == "v" else -1)
    if kind == "v":  # below the first code a v is rounded up for good
        x = x.clamp(min=x.max().item() / 200**2)
    error, deviation = mean_over_keys(x, kind)
    step = x.abs().double() / 128 if kind == "half" else x.abs().max().double() / 64
    assert (error.abs() < 5.0 * deviation + 10.0 / KEYS * step).all()  # some steps are rare
    assert abs(error.sum().item()) < 4.0 * deviation.square().sum().sqrt().item()


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-16, 1e12])
def test_a_second_moment_that_gets_no_gradient_decays(scale: float) -> None:
    """With beta2 = 0.999, 2000 steps without a gradient leave exp(-2) of it."""
    wanted = scale * 0.999**2000
    v = half = torch.full((4 * GROUP,), scale)
    v[1::2] *= 0.1
    half = v.clone()
    for step in range(2000):
        _, chance = random_bits(step, 0, v.numel())
        half = round_to_bf16(half * 0.999, chance).float()
        v = dequantize_second(*quantize_second(v * 0.999, chance))
    for got in (half, v):
        assert got[0::2].mean().item() == pytest.approx(wanted, rel=0.1)
        assert got[1::2].mean().item() == pytest.approx(0.1 * wanted, rel=0.2)


def test_rounded_to_nearest_it_would_freeze() -> None:
    v = torch.ones(GROUP).bfloat16()
    for _ in range(100):
        v = round_to_bf16(v.float() * 0.999, None)
    assert (v == 1.0).all()


def test_chance_makes_no_infinity_of_a_number() -> None:
    largest = torch.tensor([0x7F7F0001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F7EFFFF])
    x = torch.cat([s * largest.to(torch.int32).view(torch.float32) for s in (1, -1)])
    chance = torch.full((x.numel(),), 0xFFFF, dtype=torch.int32)
    got = round_to_bf16(x, chance)
    assert torch.equal(got.isinf(), x.bfloat16().isinf())
    assert round_to_bf16(torch.tensor([math.nan, math.inf]), chance[:2]).isfinite().sum() == 0


@pytest.mark.parametrize(
    "top", [1e-40, 1e-30, 1e-12, 1e-6, 1.0, 1e6, torch.finfo(torch.float32).max]
)
def test_bytes_are_near_at_every_size(top: float) -> None:
    random = torch.Generator().manual_seed(2)
    m = torch.empty(10 * GROUP + 5).uniform_(-1, 1, generator=random) * top
    v = m * m if 1e-19 < top < 1e19 else m.abs()
    m[::GROUP], v[::GROUP] = top, v.max()
    assert (dequantize_first(*quantize_first(m, None)) - m).abs().max() <= 0.012 * top
    back = dequantize_second(*quantize_second(v, None))
    assert ((back.double().sqrt() - v.double().sqrt()).abs() <= v.double().max().sqrt() / 250).all()


def test_a_second_moment_is_zero_only_where_it_is() -> None:
    v = torch.zeros(2 * GROUP)
    v[0], v[1], v[2] = 1e10, 1e-30, 1e-45
    for chance in (None, torch.zeros(v.numel(), dtype=torch.int32)):
        code, scale = quantize_second(v, chance)
        assert code[0] >= 254
        assert code[1:4].tolist() == [1, 1, 0]
        assert (code[4:] == 0).all()
        assert scale[1] == 0.0
    m_code, m_scale = quantize_first(torch.zeros(5), None)
    assert m_scale.tolist() == [0.0]
    assert not dequantize_first(m_code, m_scale).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_finite_comes_of_a_group_that_is_not(bad: float) -> None:
    x = torch.ones(3 * GROUP)
    x[GROUP + 3] = bad
    for back in (
        dequantize_first(*quantize_first(x, None)),
        dequantize_second(*quantize_second(x, None)),
    ):
        assert back[GROUP : 2 * GROUP].isnan().all()
        assert back[:GROUP].isfinite().all()
        assert back[2 * GROUP :].isfinite().all()


def test_no_gradient_is_too_small_for_a_scale() -> None:
    """Where a fp16 scale would be 0 below 6e-8."""
    m = torch.full((GROUP,), 1e-12)
    assert dequantize_first(*quantize_first(m, None)) == pytest.approx(m, rel=0.02)
    v = torch.full((GROUP,), 1e-24)
    assert dequantize_second(*quantize_second(v, None)) == pytest.approx(v, rel=0.02)
