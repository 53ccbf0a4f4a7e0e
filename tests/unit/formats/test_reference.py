"""The reference against torch.optim, within a bound, and against the papers' formulas."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import pytest
import torch
from torch import Tensor

from spacings import M_SPACINGS, P_SPACINGS, V_SPACINGS, spacings
from tensorstow.base.errors import OptionError
from tensorstow.formats.reference import (
    AdamState,
    adam_reference,
    adam_scalars,
    squared_norm_reference,
)

ELEMENTS = 1 << 15


class Hyper(TypedDict):
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Case:
    decoupled: bool
    amsgrad: bool
    step: int
    betas: tuple[float, float]
    lr: float
    eps: float
    weight_decay: float

    def hyper(self) -> Hyper:
        return Hyper(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Problem:
    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    vmax: Tensor


def log_uniform(random: torch.Generator, low: float, high: float) -> Tensor:
    exponent = torch.empty(ELEMENTS).uniform_(math.log10(low), math.log10(high), generator=random)
    sign = torch.randint(0, 2, (ELEMENTS,), generator=random) * 2 - 1
    return sign * 10.0**exponent


def random_problem(case: Case, seed: int) -> Problem:
    """Return moments whose squares are normal numbers, gradients near to them and far."""
    random = torch.Generator().manual_seed(seed)
    p, g, m = (log_uniform(random, 1e-7, 1e3) for _ in range(3))
    v = (m * log_uniform(random, 1e-2, 1e2)).square()
    vmax = v * log_uniform(random, 0.3, 3.0).abs()
    if not case.decoupled:  # if the penalty cancelled the gradient, v would have no digit in common
        g = g.abs() * p.sign()
    return Problem(p, g, m, v, vmax)


def torch_step(case: Case, problem: Problem) -> Problem:
    p = problem.p.clone().requires_grad_()
    p.grad = problem.g.clone()
    maker = torch.optim.AdamW if case.decoupled else torch.optim.Adam
    optimizer = maker([p], **case.hyper(), amsgrad=case.amsgrad, foreach=False, fused=False)
    state = {
        "step": torch.tensor(float(case.step - 1)),
        "exp_avg": problem.m.clone(),
        "exp_avg_sq": problem.v.clone(),
    }
    if case.amsgrad:
        state["max_exp_avg_sq"] = problem.vmax.clone()
    optimizer.state[p] = state
    optimizer.step()
    vmax = state.get("max_exp_avg_sq", problem.vmax)
    return Problem(p.detach(), problem.g, state["exp_avg"], state["exp_avg_sq"], vmax)


def our_step(case: Case, problem: Problem) -> Problem:
    p, vmax = problem.p.clone(), problem.vmax.clone()
    state = AdamState(problem.m.clone(), problem.v.clone(), vmax=vmax if case.amsgrad else None)
    scalars = adam_scalars(**case.hyper(), step=case.step, decoupled=case.decoupled)
    adam_reference(p, problem.g, state, scalars)
    return Problem(p, problem.g, state.m, state.v, vmax)


def worst_of_one_step(case: Case, seed: int) -> tuple[float, float, float]:
    """Return the largest differences of m, v and the parameter after one step."""
    before = random_problem(case, seed)
    ours, theirs = our_step(case, before), torch_step(case, before)
    scalars = adam_scalars(**case.hyper(), step=case.step, decoupled=case.decoupled)
    g = before.g + scalars.l2 * before.p
    u = ours.vmax if case.amsgrad else ours.v
    pull = torch.maximum(before.m.abs(), g.abs())
    step_alone = scalars.step_size * pull / (u.sqrt() * scalars.denom_scale + scalars.eps)
    return (
        spacings(ours.m, theirs.m, before.m, g),
        spacings(ours.v, theirs.v, ours.v),
        spacings(ours.p, theirs.p, before.p, ours.p, step_alone),
    )


def cases(step: int) -> Iterator[Case]:
    betas = ((0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.5, 0.9), (0.3, 0.0))
    rates = ((1e-3, 1e-8, 0.01), (3e-5, 1e-15, 0.0), (1.0, 1e-4, 0.3))
    flags = itertools.product((True, False), (True, False))
    for (decoupled, amsgrad), beta, rate in itertools.product(flags, betas, rates):
        yield Case(decoupled, amsgrad, step, beta, *rate)


@pytest.mark.parametrize("step", [1, 2, 100, 1_000_000])
def test_one_step_is_torchs_within_the_bound(step: int) -> None:
    worst = [worst_of_one_step(case, seed) for seed, case in enumerate(cases(step))]
    m, v, p = (max(column) for column in zip(*worst, strict=True))
    assert m <= M_SPACINGS
    assert v <= V_SPACINGS
    assert p <= P_SPACINGS


def test_scalars_are_exact_in_float32() -> None:
    scalars = adam_scalars(
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=7, decoupled=True
    )
    for value in scalars:
        assert torch.tensor(value, dtype=torch.float32).item() == value
    assert scalars.decay == pytest.approx(1 - 1e-4, rel=1e-7)
    assert scalars.l2 == 0.0
    assert scalars.step_size == pytest.approx(1e-3 / (1 - 0.9**7), rel=1e-7)
    assert scalars.denom_scale == pytest.approx((1 - 0.999**7) ** -0.5, rel=1e-7)


def test_scalars_without_bias_correction() -> None:
    scalars = adam_scalars(
        lr=0.5,
        betas=(0.9, 0.999),
        eps=0.0,
        weight_decay=0.25,
        step=7,
        decoupled=False,
        bias_correction=False,
    )
    assert (scalars.step_size, scalars.denom_scale) == (0.5, 1.0)
    assert (scalars.decay, scalars.l2) == (1.0, 0.25)


@pytest.mark.parametrize(
    ("betas", "step"), [((1.0, 0.9), 1), ((0.9, -0.1), 1), ((0.9, math.nan), 1), ((0.9, 0.9), 0)]
)
def test_scalars_refuse_what_divides_by_zero(betas: tuple[float, float], step: int) -> None:
    with pytest.raises(OptionError):
        adam_scalars(lr=1, betas=betas, eps=0, weight_decay=0, step=step, decoupled=True)


def test_beta1_of_zero_makes_m_the_gradient() -> None:
    scalars = adam_scalars(lr=1, betas=(0.0, 0.9), eps=1e-8, weight_decay=0, step=1, decoupled=True)
    g, state = torch.tensor([1.0]), AdamState(torch.tensor([1e10]), torch.tensor([1.0]))
    adam_reference(torch.tensor([1.0]), g, state, scalars)
    assert state.m.item() == 1.0


def test_a_master_goes_with_16_bits_only() -> None:
    scalars = adam_scalars(lr=1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0, step=1, decoupled=True)
    one = torch.ones(1)
    with pytest.raises(OptionError, match="a master"):
        adam_reference(one.bfloat16(), one, AdamState(one, one), scalars)
    with pytest.raises(OptionError, match="no master"):
        adam_reference(one, one, AdamState(one, one, master=one), scalars)


def test_the_norm_adds_lanes_in_order_and_as_a_tree() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    lane = [0.0] * 16
    for i, value in enumerate(x.tolist()):
        lane[i % 16] += value * value
    for half in (8, 4, 2, 1):
        lane = [lane[k] + lane[k + half] for k in range(half)]
    assert squared_norm_reference(x) == lane[0]
    assert squared_norm_reference(torch.empty(0)) == 0.0
