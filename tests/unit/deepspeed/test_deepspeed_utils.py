"""Whole weights, gradients and states of one parameter."""

import pytest
import torch

from ranks.driven import Drive, read_and_set
from ranks.pool import Ranks
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed import utils
from tensorstow.deepspeed.config.settings import OffloadOptimizer, OffloadParam, Zero

DRIVES = [
    Drive(Zero(2, OffloadOptimizer("cpu"))),
    Drive(Zero(3, OffloadOptimizer("nvme"), OffloadParam("nvme")), bf16=True, overlap="none"),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("drive", DRIVES, ids=str)
def test_what_is_set_is_read_and_trained_on(ranks: "Ranks", drive: Drive, world: int) -> None:
    ranks(world).run(read_and_set, drive)


def test_a_parameter_of_nobody_is_refused() -> None:
    with pytest.raises(OptionError, match="is no parameter of an engine"):
        utils.safe_get_full_fp32_param(torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(OptionError, match="that is not there"):
        utils.safe_set_full_grad(torch.nn.Parameter(torch.ones(3)), torch.ones(3))
