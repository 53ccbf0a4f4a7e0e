"""Gradients of a stowed model: read, clipped by torch and by us, scaled, dropped."""

from functools import partial

import pytest
import torch
from torch import nn

from ranks.pool import Pool
from ranks.stowed import twins
from ranks.twin import FETCHED, FETCHED_BESIDE, whole
from tensorstow import Plan

PLANS = [Plan(), Plan(overlap="forward", states="disk"), Plan(stage=2), FETCHED, FETCHED_BESIDE]


def clipped_by_torch(plan: Plan, dtype: torch.dtype, *way: bool) -> float:
    """Clip by torch's function, which is to act on what the update uses."""
    both = twins(plan, dtype)
    foreach = way[0] if way else None
    for step in range(2):
        for micro in range(plan.accumulation_steps):
            both.backward(2 * step + micro)
        both.compare_gradients()
        norm = nn.utils.clip_grad_norm_(both.stowed.parameters(), 0.05, foreach=foreach)
        total = whole(norm)
        assert total is not None
        own = nn.utils.get_total_norm([p.grad for p in both.alone.parameters()])
        torch.testing.assert_close(total, own, rtol=1e-6, atol=0.0)  # sums of shards, in fp32
        assert total > 0.05
        nn.utils.clip_grads_with_norm_(both.alone.parameters(), 0.05, total, foreach=foreach)
        both.compare_gradients()
        both.step()
    both.close()
    return total.item()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"z{p.stage}-{p.overlap}-{p.parameters}")
def test_torch_clips_the_gradients_that_the_update_uses(
    ranks: Pool, plan: Plan, world: int
) -> None:
    norms = ranks(world).run(clipped_by_torch, plan, torch.float32)
    assert len(set(norms)) == 1


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("foreach", [True, False])
def test_torch_clips_bf16_gradients_that_were_summed_in_fp32(
    ranks: Pool, world: int, *, foreach: bool
) -> None:
    plan = Plan(accumulation_steps=2)
    norms = ranks(world).run(clipped_by_torch, plan, torch.bfloat16, foreach)
    assert len(set(norms)) == 1


def clipped_by_ours(plan: Plan, dtype: torch.dtype) -> float:
    both = twins(plan, dtype)
    for step in range(2):
        for micro in range(plan.accumulation_steps):
            both.backward(2 * step + micro)
        ours, theirs = both.each(lambda _, optimizer: optimizer.clip_grad_norm_(0.05))
        torch.testing.assert_close(ours, theirs, rtol=1e-15, atol=0.0)
        both.step()
    both.close()
    return float(ours)


@pytest.mark.parametrize("world", [1, 2])
def test_our_norm_is_the_same_on_every_rank(ranks: Pool, world: int) -> None:
    norms = ranks(world).run(clipped_by_ours, Plan(accumulation_steps=2), torch.bfloat16)
    assert len(set(norms)) == 1


def touched(plan: Plan) -> None:
    """Do to gradients what training code does to them."""
    both = twins(plan, torch.bfloat16)
    both.backward(0)
    both.each(lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.01))
    both.each(lambda model, _: [p.grad.add_(0.25) for p in model.parameters()])
    both.each(lambda model, _: [p.grad.add_(torch.ones_like(p.grad)) for p in model.parameters()])
    both.each(lambda model, _: [p.grad.detach().mul_(0.5) for p in model.parameters()])
    both.compare_gradients()
    both.step()
    both.backward(1)
    for model in (both.stowed, both.alone):
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
    both.compare_gradients()
    both.step()
    both.close()


@pytest.mark.parametrize("world", [1, 2])
def test_what_users_do_to_gradients_is_done_to_what_the_update_uses(
    ranks: Pool, world: int
) -> None:
    ranks(world).run(touched, Plan())


def read(dtype: torch.dtype) -> list[torch.dtype]:
    """Return the dtypes that gradients say they have, after one micro-batch and after two."""
    both = twins(Plan(), dtype)
    seen = []
    for batch in range(2):
        both.backward(batch)
        for parameter in both.stowed.parameters():
            full = whole(parameter.grad)
            assert full is not None
            assert type(full) is torch.Tensor
            assert full.shape == parameter.shape
            assert full.dtype == parameter.grad.dtype
            torch.testing.assert_close(parameter.grad.norm().full_tensor(), full.norm())
        seen.append(full.dtype)
    both.close()
    return seen


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_readable_and_say_their_dtype(ranks: Pool, world: int) -> None:
    for seen in ranks(world).run(read, torch.bfloat16):
        assert seen == [torch.bfloat16, torch.float32]


def dropped(how: str, *, set_to_none: bool) -> None:
    both = twins(Plan(), torch.float32)
    both.backward(0)
    both.each(lambda *pair: pair[how == "optimizer"].zero_grad(set_to_none=set_to_none))
    for parameter in both.stowed.parameters():
        full = whole(parameter.grad)
        assert full is None if set_to_none else not full.any()
    both.backward(1)
    both.compare_gradients()
    both.step()
    both.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["model", "optimizer"])
def test_zero_grad_drops_gradients(ranks: Pool, how: str, world: int) -> None:
    for set_to_none in (True, False):
        ranks(world).run(partial(dropped, set_to_none=set_to_none), how)
