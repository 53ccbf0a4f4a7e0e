"""Random bits: what they must not show."""

import itertools

import torch
from torch import Tensor

from tensorstow.formats.stochastic_rounding import random_bits

COUNT = 1 << 20
KEYS = (0, 1, 2, 1 << 32, (5 << 32) | 7, 2**64 - 1)


def excess(a: Tensor, b: Tensor, *, bits: int = 5) -> float:
    """Return the chi-square of pairs by their high bits, in standard deviations from its mean."""
    side = 1 << bits
    cell = (a >> (16 - bits)).long() * side + (b >> (16 - bits)).long()
    counts = torch.bincount(cell, minlength=side * side).double()
    expected = a.numel() / side**2
    square = ((counts - expected) ** 2 / expected).sum().item()
    freedom = side**2 - 1
    return (square - freedom) / (2.0 * freedom) ** 0.5


def test_every_value_comes_as_often() -> None:
    for key in KEYS:
        for numbers in random_bits(key, 0, COUNT):
            assert numbers.min() == 0
            assert numbers.max() == 0xFFFF
            counts = torch.bincount(numbers, minlength=1 << 16).double()
            expected = COUNT / (1 << 16)
            square = ((counts - expected) ** 2 / expected).sum().item()
            assert abs(square - 65535) < 5 * (2 * 65535) ** 0.5


def test_nothing_goes_with_anything() -> None:
    """First with second moments, elements with neighbours, steps and parameters with the next."""
    for key in KEYS:
        m, v = random_bits(key, 0, COUNT)
        assert abs(excess(m, v)) < 5
        for apart, numbers in itertools.product((1, 2, 16, 32, 64, 4096), (m, v)):
            assert abs(excess(numbers[:-apart], numbers[apart:])) < 5
        for other in (key + 1, key + (1 << 32)):
            for ours, theirs in zip((m, v), random_bits(other % 2**64, 0, COUNT), strict=True):
                assert abs(excess(ours, theirs)) < 5


def test_an_element_keeps_its_bits_wherever_a_range_begins() -> None:
    whole = random_bits(9, 0, 1000)
    part = random_bits(9, 300, 200)
    for all_of_it, some in zip(whole, part, strict=True):
        assert torch.equal(all_of_it[300:500], some)
    high, low = random_bits(9, 2**32 + 5, 10), random_bits(9, 5, 10)
    assert torch.equal(high[0], low[0])
