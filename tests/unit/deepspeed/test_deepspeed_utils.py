"""Whole weights, gradients and states of one parameter."""

from functools import partial

import pytest
import torch

from ranks.driven import Drive, engine_by, read_and_set
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
    with pytest.raises(OptionError, match="is not an engine's parameter"):
        utils.safe_get_full_fp32_param(torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(OptionError, match="that is not there"):
        utils.safe_set_full_grad(torch.nn.Parameter(torch.ones(3)), torch.ones(3))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_parameter_has_no_fp32_weight_and_no_states(stage: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(requires_grad=False)
    engine = engine_by(model, bf16={"enabled": True}, zero_optimization={"stage": stage})
    engine.backward(engine(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
    engine.step()
    frozen, trained = engine.module[0].weight, engine.module[1].weight
    for read in (
        utils.safe_get_full_fp32_param,
        utils.safe_get_local_fp32_param,
        utils.safe_get_full_grad,
        partial(utils.safe_get_full_optimizer_state, optim_state_key="exp_avg"),
    ):
        assert read(frozen) is None
    assert utils.safe_get_full_fp32_param(trained).dtype == torch.float32
    for write in (
        utils.safe_set_full_fp32_param,
        partial(utils.safe_set_full_optimizer_state, optim_state_key="exp_avg"),
    ):
        with pytest.raises(OptionError, match=r"shape \(3,\) was given for .* \(2, 3\): pass the"):
            write(trained, torch.ones(3))
    utils.safe_set_full_fp32_param(frozen, torch.full((3, 2), 0.5))
    assert frozen.eq(0.5).all()
    assert frozen not in engine.optimizer.state
    engine.destroy()
