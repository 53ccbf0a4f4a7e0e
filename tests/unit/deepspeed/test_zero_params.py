"""What scripts look for on a sharded parameter."""

import torch
import torch.distributed as dist
from torch import nn

import tensorstow.deepspeed as deepspeed
from ranks.pool import Ranks
from tensorstow.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param


def test_a_sharded_parameter_says_what_of_it_is_here(ranks: "Ranks") -> None:
    ranks(2).run(said)


def said() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    config["zero_optimization"] = zero
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    assert not is_zero_param(model[0].weight)
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
    assert engine.config == config
    assert engine.zero_gather_16bit_weights_on_model_save()
    assert (optimizer.overflow, optimizer.cur_scale) == (False, 1.0)
    parameters = list(engine.module.parameters())
    assert len({p.ds_id for p in parameters}) == 4
    for parameter in parameters:
        assert is_zero_param(parameter)
        assert parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
        assert (parameter.ds_shape, parameter.ds_numel) == (parameter.shape, parameter.numel())
        assert not parameter.ds_persist
        number = parameter.ds_id
        with deepspeed.zero.GatheredParameters(parameter):
            assert parameter.ds_status == ZeroParamStatus.AVAILABLE
            assert parameter.ds_id == number
        assert parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert (whole is None) == (dist.get_rank() > 0)
    if whole is not None:
        fresh = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
        fresh.load_state_dict(whole)
        assert all(type(values) is torch.Tensor for values in whole.values())
    engine.destroy()
