"""A ``loss.backward()`` in place of ``engine.backward(loss)``."""

import pytest
import torch
from torch import nn

from ranks.driven import engine_by
from tensorstow.base.errors import BackwardError, OptionError
from tensorstow.deepspeed.step import DirectBackward

FP16 = {"fp16": {"enabled": True, "loss_scale": 8.0}}


class Losses(nn.Module):
    """A model that returns its loss, and logits with it."""

    def __init__(self, *, also_logits: bool) -> None:
        """Make a layer."""
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.also_logits = also_logits

    def forward(self, x: torch.Tensor) -> object:
        """Return them."""
        logits = self.layer(x)
        return {"loss": logits.sum(), "logits": logits} if self.also_logits else logits.sum()


def test_gradients_are_divided_by_the_micro_batches() -> None:
    engine = engine_by(Losses(also_logits=False), gradient_accumulation_steps=4)
    for number in range(4):
        loss = engine(torch.ones(1, 2))
        if number % 2:
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()
        assert engine.was_step_applied() is (number == 3)
    assert engine.get_global_grad_norm() == pytest.approx(2**0.5)
    engine.destroy()


def test_a_loss_is_scaled_by_hand_or_refused() -> None:
    engine = engine_by(Losses(also_logits=True), **FP16)
    x = torch.ones(1, 2).half()
    engine.scale(engine(x)["loss"]).backward()
    assert engine.module.layer.weight.grad.tolist() == [[8.0, 8.0]]
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(2**0.5)
    assert engine.was_step_applied()
    with pytest.raises(OptionError, match=r"shape \(2,\)"):
        engine.scale(torch.ones(2))
    with pytest.raises(BackwardError, match="Loss scaling is required"):
        engine(x)["loss"].backward()
    engine.zero_grad()
    engine.destroy()


def test_which_of_several_outputs_is_to_be_divided_is_not_guessed() -> None:
    engine = engine_by(Losses(also_logits=True), gradient_accumulation_steps=2)
    with pytest.raises(BackwardError, match="several tensors"):
        engine(torch.ones(1, 2))["loss"].backward()
    engine.zero_grad()
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2))["loss"])
        engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(2**0.5)
    engine.destroy()


def test_the_last_micro_batch_is_not_guessed_where_updates_run_beside_backward() -> None:
    watched = DirectBackward(2, needs_scale=False, beside_backward=True)
    loss = nn.Linear(2, 1)(torch.ones(2)).sum()
    watched.watch(loss)
    with watched.engines_own():
        loss.backward(retain_graph=True)
    with pytest.raises(BackwardError, match='overlap="backward"'):
        loss.backward()


def test_gradients_of_torch_func_are_not_divided() -> None:
    engine = engine_by(Losses(also_logits=False), gradient_accumulation_steps=4)
    x = torch.ones(1, 2)
    found = torch.func.grad(engine)(x)
    assert torch.equal(found, torch.func.grad(engine.module)(x))
    engine.destroy()


def test_a_loss_of_two_engines_is_gone_through_as_it_is() -> None:
    engines = [engine_by(Losses(also_logits=False), **FP16) for _ in range(2)]
    x = torch.ones(1, 2).half()
    losses = [engine.module(x) for engine in engines]
    (losses[0] + losses[1] / 2).backward()
    for engine, norm in zip(engines, [2**0.5, 2**-0.5], strict=True):
        engine._backward_epilogue()  # documented by upstream
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm)
        engine.scale(engine.module(x)).backward()
        engine._backward_epilogue()
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(2**0.5)
        engine.destroy()


def test_scaled_losses_and_others_are_not_summed() -> None:
    engine = engine_by(Losses(also_logits=False), gradient_accumulation_steps=2, **FP16)
    x = torch.ones(1, 2).half()
    engine.module(x).backward()
    engine._backward_epilogue()
    engine.step()
    engine.backward(engine(x))
    with pytest.raises(BackwardError, match="1 of 2 losses of this step"):
        engine.step()
    engine.zero_grad()
    engine.destroy()
