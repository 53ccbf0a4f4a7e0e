"""Offloaded training against torch.optim itself: each of 20 steps within the stated bound."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parity.axes import case_of
from parity.problem import Model, one_torch_thread
from spacings import M_SPACINGS, P_SPACINGS, V_SPACINGS, spacings
from tensorstow import Adam, AdamW, PipelinePolicy
from tensorstow.optim.stowed_adam import StowedAdam

STEPS = 20
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.999), 1e-8, 0.1
Kinds = type[AdamW] | type[Adam]

# After 20 steps on paths of their own the weights differ by at most this share of the way gone:
# the first step's bound of P_SPACINGS * 2^-23, fed back through the gradients at most 10-fold.
# (Measured: half of one such step.)
DRIFT = 10 * P_SPACINGS * 2.0**-23


@dataclass(frozen=True)
class Snapshot:
    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    vmax: Tensor
    step: Tensor


def snapshots(model: Model, optimizer: StowedAdam) -> dict[str, Snapshot]:
    """Return everything that the next step starts from, by parameter."""
    states = optimizer.state_dict()["state"]
    taken = {}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.grad is not None and parameter.numel():
            zero = torch.zeros_like(parameter.detach())
            state = states.get(index, {})
            taken[name] = Snapshot(
                parameter.detach().clone(),
                parameter.grad.clone(),
                state.get("exp_avg", zero).clone(),
                state.get("exp_avg_sq", zero).clone(),
                state.get("max_exp_avg_sq", zero).clone(),
                state.get("step", torch.tensor(0.0)).clone(),
            )
    return taken


def torch_step(kind: Kinds, before: Snapshot, *, amsgrad: bool) -> Snapshot:
    p = before.p.clone().requires_grad_()
    p.grad = before.g
    maker = torch.optim.AdamW if kind is AdamW else torch.optim.Adam
    theirs = maker([p], LR, BETAS, EPS, DECAY, amsgrad=amsgrad, foreach=False, fused=False)
    state = {"step": before.step.clone(), "exp_avg": before.m.clone()}
    state |= {"exp_avg_sq": before.v.clone(), "max_exp_avg_sq": before.vmax.clone()}
    theirs.state[p] = state
    theirs.step()
    return Snapshot(
        p.detach(), before.g, state["exp_avg"], state["exp_avg_sq"], state["max_exp_avg_sq"],
        state["step"],
    )  # fmt: skip


def assert_within_the_bound(
    kind: Kinds, before: Snapshot, ours: Snapshot, *, amsgrad: bool
) -> None:
    theirs = torch_step(kind, before, amsgrad=amsgrad)
    assert ours.step.equal(theirs.step)
    # Where a sum cancels, a spacing is that of its largest term: see test_reference.
    g = before.g if kind is AdamW else before.g.abs() + DECAY * before.p.abs()
    pull = torch.maximum(before.m.abs(), g.abs())
    second = (ours.vmax if amsgrad else ours.v) / (1 - BETAS[1] ** ours.step)
    step_alone = LR / (1 - BETAS[0] ** ours.step) * pull / (second.sqrt() + EPS)
    assert spacings(ours.m, theirs.m, before.m, g) <= M_SPACINGS
    assert spacings(ours.v, theirs.v, ours.v, g * g * (1 - BETAS[1])) <= V_SPACINGS
    assert spacings(ours.p, theirs.p, before.p, ours.p, step_alone) <= P_SPACINGS


@one_torch_thread()
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_each_of_twenty_steps_is_torchs_within_the_bound(
    kind: Kinds, tmp_path: Path, *, amsgrad: bool
) -> None:
    model = Model(case_of({}).recipe)
    optimizer = kind(
        model.parameters(), LR, BETAS, EPS, DECAY, amsgrad=amsgrad,
        states=0.6, dir=tmp_path, durability="none", policy=PipelinePolicy(chunk_elements=4096),
    )  # fmt: skip
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(model.loss(step, 0))
        before = snapshots(model, optimizer)
        optimizer.step()
        after = snapshots(model, optimizer)
        assert before.keys() == after.keys()
        for name, snapshot in before.items():
            assert_within_the_bound(kind, snapshot, after[name], amsgrad=amsgrad)


@one_torch_thread()
def test_twenty_steps_end_where_torchs_do(tmp_path: Path) -> None:
    ours, theirs = Model(case_of({}).recipe), Model(case_of({}).recipe)
    begun = {n: p.detach().clone() for n, p in ours.named_parameters()}
    stowed = AdamW(ours.parameters(), LR, states="disk", dir=tmp_path, durability="none")
    plain = torch.optim.AdamW(theirs.parameters(), LR, foreach=False)
    for step in range(STEPS):
        for model, optimizer in ((ours, stowed), (theirs, plain)):
            optimizer.zero_grad()
            torch.autograd.backward(model.loss(step, 0))
            optimizer.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        way = (b.detach() - begun[name]).norm()
        assert (a.detach() - b.detach()).norm() <= DRIFT * way
