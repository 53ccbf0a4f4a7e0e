"""The engine trains as its parts do by hand, and says what DeepSpeed's says."""

import pytest
import torch

from ranks.driven import Drive, by_hand, driven, overflowing, scaled
from ranks.pool import Ranks
from tensorstow.deepspeed.settings import OffloadOptimizer, OffloadParam, Zero

NVME, CPU = OffloadOptimizer("nvme"), OffloadOptimizer("cpu")
DRIVES = [
    *(Drive(Zero(stage=stage, offload_optimizer=CPU), accumulation=2) for stage in (0, 1, 2)),
    Drive(Zero(stage=2, offload_optimizer=CPU), clip=0.05, bf16=True),
    Drive(Zero(3, NVME, OffloadParam("cpu")), accumulation=2, clip=0.05, bf16=True),
    Drive(Zero(3, NVME, OffloadParam("nvme")), bf16=True),
]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("drive", DRIVES, ids=str)
def test_the_engine_has_the_bits_of_its_parts(ranks: "Ranks", drive: Drive, world: int) -> None:
    want = ranks(world).run(by_hand, drive)
    for got in ranks(world).run(driven, drive):
        assert same(got, want[0])


@pytest.mark.parametrize("world", [1, 2])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(ranks: "Ranks", world: int) -> None:
    drive = Drive(Zero(stage=3), accumulation=2)
    assert same(ranks(world).run(scaled, drive)[0], ranks(world).run(by_hand, drive)[0])


@pytest.mark.parametrize("world", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: "Ranks", world: int) -> None:
    for changed, told, skipped in ranks(world).run(overflowing):
        assert changed == [True, False, True]
        assert told == [False, True, False]
        assert skipped == 1
