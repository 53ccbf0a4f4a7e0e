"""Sums of micro-batches' gradients that stay on the device: fp32, whatever the parameters are."""

from functools import partial

import pytest
import torch
from torch import nn

from ranks.ordered import ordered
from ranks.pool import Pool
from tensorstow import AdamW, Plan, stow
from tensorstow.fsdp.fp32_sums import accumulate_in_fp32, widen_gradient
from tensorstow.tensors.dtensor import gradient_of


def test_gradients_of_several_backward_passes_are_summed_in_fp32() -> None:
    """In bf16 the second would be lost: 1 + 2^-9 is 1. The first keeps its dtype."""
    layer = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    accumulate_in_fp32(layer.parameters())
    for x, dtype in ((1.0, torch.bfloat16), (2.0**-9, torch.float32)):
        layer(torch.full((1, 1), x, dtype=torch.bfloat16)).backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == dtype
    assert layer.weight.grad.item() == 1.0 + 2.0**-9


def test_a_gradient_is_widened_once() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    widen_gradient(parameter)
    assert parameter.grad is None
    parameter.grad = torch.full((2,), 0.5, dtype=torch.bfloat16)
    widen_gradient(parameter)
    wide = parameter.grad
    assert wide is not None
    assert wide.dtype == torch.float32
    widen_gradient(parameter)
    assert parameter.grad is wide


def test_a_model_that_stow_leaves_whole_sums_in_fp32() -> None:
    layer = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    model, optimizer = stow(layer, partial(AdamW, lr=1e-3), plan=Plan(accumulation_steps=2))
    inputs = [torch.full((1, 4), value, dtype=torch.bfloat16) for value in (1.0, 2**-10)]
    for x in inputs:
        model(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.unique().tolist() == [1.0 + 2**-10]  # bf16 has no such number
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_wait_unreduced_are_summed_in_fp32(ranks: Pool, stage: int) -> None:
    for gradients in ranks(2).run(unreduced, stage):
        assert gradients == [260.0]


def unreduced(stage: int) -> list[float]:
    """Return the gradients of five micro-batches: in bf16 256 + 1 is 256, and 260 a number."""
    layer = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    make = partial(AdamW, lr=1e-3)
    model, optimizer = stow(layer, make, plan=Plan(stage=stage, accumulation_steps=5))
    for value in (256.0, 1.0, 1.0, 1.0, 1.0):
        if stage == 0:
            model.set_requires_gradient_sync(False)
        loss = model(torch.full((1, 4), value, dtype=torch.bfloat16)).sum()
        loss.backward()
    if stage == 0:
        model.set_requires_gradient_sync(True)
        (0 * model(torch.ones(1, 4, dtype=torch.bfloat16)).sum()).backward()
    gradient = gradient_of(layer.weight)
    optimizer.close()
    return gradient.unique().tolist()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_averages_of_ranks_have_the_same_bits_with_every_overlap(ranks: Pool, stage: int) -> None:
    """Updates in backward take averages from FSDP2, which rounds them to bf16 by itself."""
    plan = Plan(parameters="host", states="disk", stage=stage)
    trained = [
        ranks(2).run(partial(_trained, plan.but(overlap=overlap)))
        for overlap in ("none", "forward", "backward", "speculative")
    ]
    assert all(trained[0] == other for other in trained[1:])


def _trained(plan: Plan) -> dict[str, str]:
    first = ordered(plan, steps=2, micro_batches=4, dtype=torch.bfloat16)
    then = ordered(plan, micro_batches=4, dtype=torch.bfloat16, frozen=True, unfrozen_at=1)
    return first | {f"{name}, unfrozen": value for name, value in then.items()}
