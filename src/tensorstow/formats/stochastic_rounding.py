"""Random bits of stochastic rounding: a function of a key and an element's index."""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF


def random_bits(
    key: int, first: int, count: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return two 16-bit numbers (int32) on ``device`` for each element from ``first`` on.

    [Note: Random bits] in csrc/kernels/random_bits.h, bit for bit: the first number rounds first
    moments, the second one second moments.
    """
    before, inside = key_words(key)
    x = (torch.arange(first, first + count, dtype=torch.int64, device=device) & _WORD) ^ before
    x = _times(x ^ (x >> 17), 0xED5AD4BB)
    x = ((x ^ (x >> 11)) + inside) & _WORD
    x = _times(x, 0xAC4C1B51)
    x = _times(x ^ (x >> 15), 0x31848BAB)
    x = x ^ (x >> 14)
    return (x & 0xFFFF).int(), (x >> 16).int()


def key_words(key: int) -> tuple[int, int]:
    """Mix a 64-bit key (splitmix64); return the two 32-bit words that go into each draw."""
    z = (key + 0x9E3779B97F4A7C15) & _LONG
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _LONG
    z ^= z >> 31
    return z & _WORD, z >> 32


def _times(x: Tensor, factor: int) -> Tensor:
    return (x * factor) & _WORD  # what overflows 64 bits is far above the word
