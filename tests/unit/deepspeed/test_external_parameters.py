"""A weight that another block uses is whole there, and gets its gradient."""

import pytest
import torch
from torch import nn

import tensorstow.deepspeed as deepspeed
from ranks.external import Chain, trained_with_an_external_weight, used_outside_of_blocks
from ranks.pool import Ranks
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed import zero
from tensorstow.deepspeed.external_parameters import blocks_to_gather

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("device", ["none", "cpu"])
def test_it_trains_as_a_plain_loop(ranks: "Ranks", world: int, device: str) -> None:
    want = trained_with_an_external_weight({})
    section = {"stage": 3, "offload_param": {"device": device}}
    config = {**CONFIG, "zero_optimization": section}
    for got in ranks(world).run(trained_with_an_external_weight, config):
        for ours, plain in zip(got, want, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)


def test_a_use_outside_of_a_block_is_named_with_the_call_that_takes_it(ranks: "Ranks") -> None:
    config = {**CONFIG, "zero_optimization": {"stage": 3}}
    for refused, taken, method_refused, method_taken in ranks(2).run(
        used_outside_of_blocks, config
    ):
        assert "zero.register_external_parameter(model, weight)" in refused
        assert method_refused == refused
        assert taken == method_taken == ""


def test_the_other_blocks_stay_units() -> None:
    model = Chain()
    first, second, third = model.blocks
    assert blocks_to_gather(model) is None
    zero.register_external_parameter(first, first.linear.weight)
    assert blocks_to_gather(model) is None
    zero.register_external_parameter(third, first.linear.weight)
    assert blocks_to_gather(model) == [second, third]
    zero.unregister_external_parameter(third, first.linear.weight)
    assert blocks_to_gather(model) is None
    with pytest.raises(OptionError, match="was not registered"):
        zero.unregister_external_parameter(third, first.linear.weight)
    with pytest.raises(OptionError, match="A Tensor was given"):
        zero.register_external_parameter(third, torch.ones(2))


def test_it_is_too_late_behind_initialize() -> None:
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG)
    with pytest.raises(OptionError, match="Call it before"):
        zero.register_external_parameter(engine.module, engine.module.weight)
    engine.destroy()
