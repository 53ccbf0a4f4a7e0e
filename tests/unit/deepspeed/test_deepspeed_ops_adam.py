"""Upstream's optimizers by name."""

import pytest
import torch
from torch import nn

from tensorstow.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam


def trained(make: object, steps: int = 3) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().clone()


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam])
def test_the_rule_is_adamw_with_upstream_s_defaults(kind: type) -> None:
    got = trained(lambda p: kind(p, lr=1e-2))
    want = trained(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0))
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-7)


def test_moments_that_are_not_corrected_make_another_step() -> None:
    plain = trained(DeepSpeedCPUAdam, 1)
    uncorrected = trained(lambda p: DeepSpeedCPUAdam(p, bias_correction=False), 1)
    assert not torch.allclose(plain, uncorrected)


@pytest.mark.parametrize("none", [True, False])
def test_zero_grad_does_what_set_grad_none_says(none: bool) -> None:  # noqa: FBT001
    weight = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([weight], set_grad_none=none)
    weight.sum().backward()
    optimizer.zero_grad()
    assert (weight.grad is None) == none
