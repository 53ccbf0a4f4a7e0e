"""Masters of bf16 weights: there and back for every low half and every kind of high one."""

import math

import torch
from torch import Tensor

from tensorstow.formats.state_format import join_bytes, join_halves, split_bytes, split_halves

LOWS = torch.arange(1 << 16, dtype=torch.int32)
HIGHS = (
    *(0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0xBF80, 0xBFFF),
    *(0x7F7E, 0x7F7F, 0xFF7F, 0xFF7E, 0x4000, 0xC0FF),
    *range(1, 0x7F80, 997),
    *range(0x8001, 0xFF80, 997),
)


def masters(high: int) -> Tensor:
    return ((LOWS + (high << 16)).to(torch.int32)).view(torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_split_masters_come_back_for_every_low_half() -> None:
    for high in HIGHS:
        master = masters(high)
        low, rounded_up = split_halves(master)
        assert same_bits(join_halves(master.bfloat16(), low, rounded_up), master)
        assert rounded_up.sum() == high % 2  # of all low halves only one is a tie


def test_split_masters_come_back_for_any_bits() -> None:
    random = torch.Generator().manual_seed(1)
    for _ in range(8):
        bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=random).to(torch.int32)
        master = bits.view(torch.float32)
        back = join_halves(master.bfloat16(), *split_halves(master))
        assert torch.equal(back.isnan(), master.isnan())
        assert same_bits(back[~back.isnan()], master[~back.isnan()])


def test_infinities_come_back_and_so_does_what_rounds_to_one() -> None:
    master = torch.tensor([math.inf, -math.inf, 3.4028235e38, -3.4028235e38, 3.3961776e38])
    weight = master.bfloat16()
    assert weight[2].isinf()
    assert same_bits(join_halves(weight, *split_halves(master)), master)


def test_a_nan_stays_one_whatever_its_low_half() -> None:
    for high in (0x7F80, 0x7FC0, 0x7FFF, 0xFF81, 0xFFFF):
        master = masters(high)[1:]
        assert join_halves(master.bfloat16(), *split_halves(master)).isnan().all()
        assert join_bytes(master.bfloat16(), split_bytes(master)).isnan().all()


def test_24_bits_are_the_nearest_but_for_ties() -> None:
    for high in HIGHS:
        master = masters(high)
        back = join_bytes(master.bfloat16(), split_bytes(master))
        bits = master.view(torch.int32)
        nearest = (bits + 0x7F + ((bits >> 8) & 1)) & ~0xFF
        off = (back.view(torch.int32) - nearest).abs()
        assert ((off == 0) | (off == 0x100)).all()
        half_way = (nearest & 0xFFFF) == 0x8000
        assert torch.equal(back.view(torch.int32) != nearest, half_way)
        assert same_bits(back.bfloat16().float(), master.bfloat16().float())
        assert torch.equal(split_bytes(back), split_bytes(master))
