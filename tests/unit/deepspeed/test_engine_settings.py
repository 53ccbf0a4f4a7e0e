"""Batch sizes of an engine that is there already."""

import logging

import pytest
import torch

import tensorstow.deepspeed as deepspeed
from compare import all_equal
from ranks.driven import engine_by
from ranks.stowed import loss_of
from tensorstow.base.errors import OptionError


def made(accumulation: int, *, bf16: bool = False) -> deepspeed.DeepSpeedEngine:
    return engine_by(micro=2, gradient_accumulation_steps=accumulation, bf16={"enabled": bf16})


def trained(engine: deepspeed.DeepSpeedEngine, *, direct: bool) -> list[torch.Tensor]:
    for micro in range(4):
        loss = loss_of(engine, 0, 0, micro)
        loss.backward() if direct else engine.backward(loss)
        engine.step()
    assert engine.global_steps == 1
    weights = [p.detach().clone() for p in engine.parameters()]
    engine.destroy()
    return weights


@pytest.mark.parametrize("direct", [False, True])
def test_steps_have_the_micro_batches_that_they_are_given(*, direct: bool) -> None:
    engine = made(1)
    engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (8, 2, 4)
    assert all_equal(trained(engine, direct=direct), trained(made(4), direct=False))


def test_a_forward_s_samples_are_changed_alone() -> None:
    engine = made(2)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (10, 5, 2)
    with pytest.raises(OptionError, match="1 or more"):
        engine.set_train_micro_batch_size(0)
    engine.destroy()


def test_sizes_that_cannot_be_had_are_refused() -> None:
    engine = made(1, bf16=True)
    for size in (3, 0):
        with pytest.raises(OptionError, match="multiple of that"):
            engine.set_train_batch_size(size)
    with pytest.raises(OptionError, match="sums of 16-bit gradients"):
        engine.set_train_batch_size(4)
    assert engine.get_batch_info() == (2, 2, 1)
    assert engine.managed_gradient_accumulation()
    engine.destroy()


def test_the_log_has_the_level_of_the_configuration() -> None:
    level = deepspeed.logger.level
    try:
        engine_by(torch.nn.Linear(1, 1), log_level="ERROR").destroy()
        assert deepspeed.logger.level == logging.ERROR
    finally:
        deepspeed.logger.setLevel(level)
