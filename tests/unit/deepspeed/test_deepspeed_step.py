"""One update: the norm, the factor, and steps that are not taken."""

import math

import pytest
import torch
from torch import nn

import tensorstow
from ranks.driven import FixedScale
from tensorstow.deepspeed.step import OptimizerStep


def weights_behind(gradient: list[float], clipping: float, scale: float | None) -> torch.Tensor:
    weight = nn.Parameter(torch.ones(2))
    optimizer = tensorstow.AdamW([weight], lr=0.1, eps=1.0)
    update = OptimizerStep(optimizer, clipping, None if scale is None else FixedScale(scale))
    weight.grad = torch.tensor(gradient) * (scale or 1.0)
    assert update.run() == all(map(math.isfinite, gradient))
    assert weight.grad is None
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")
    assert optimizer.loss_scaler is update._scale
    assert not optimizer.dynamic_loss_scale
    assert optimizer.needs_scaler() is (scale is not None)
    if math.isfinite(sum(gradient)):
        assert update.norm == pytest.approx(math.hypot(*gradient))
    optimizer.close()
    return weight.detach()


@pytest.mark.parametrize("clipping", [0.0, 1e-6])
def test_a_scale_changes_no_bit_of_a_step(clipping: float) -> None:
    small = [3e-6, 4e-6]  # beside which the 1e-6 in the clip factor's denominator counts
    plain = weights_behind(small, clipping, None)
    assert torch.equal(weights_behind(small, clipping, 65536.0), plain)


def test_clipping_is_by_the_norm() -> None:
    clipped = weights_behind([3.0, 4.0], 0.5, None)
    assert torch.allclose(clipped, weights_behind([0.3, 0.4], 0.0, None), rtol=1e-5)


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite_change_nothing(bad: float, scale: float | None) -> None:
    assert torch.equal(weights_behind([1.0, bad], 1.0, scale), torch.ones(2))
