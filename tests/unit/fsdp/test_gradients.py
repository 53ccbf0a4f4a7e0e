"""Sums of gradients on the device are fp32 where several micro-batches make one."""

import pytest
import torch

from ranks.pool import Ranks
from ranks.sharded import WIDTH, widened


@pytest.mark.parametrize("world", [1, 2])
def test_a_sum_on_the_device_is_wide(ranks: "Ranks", world: int) -> None:
    for (total,) in ranks(world).run(widened, 4):
        assert total.dtype == torch.float32
        assert torch.equal(total, torch.full((1, WIDTH), 259.0))
