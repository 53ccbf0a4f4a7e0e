"""Learning-rate schedules and GradScaler over a stowed model."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from parity.cover import crossed
from ranks.pool import Pool
from ranks.stowed import loss_of, model_of, twins
from ranks.twin import FETCHED, FETCHED_BESIDE, Twins, whole
from tensorstow import Plan

PLANS = [
    Plan(),
    Plan(overlap="forward", states="disk"),
    FETCHED,
    FETCHED_BESIDE,
    Plan(overlap="speculative", states="disk"),
    Plan(parameters="disk", states="disk", overlap="speculative"),
]
BAD = 1
"""The step in which a rank's loss is infinite."""


def bad_on_the_last(world: int, scaler: torch.amp.GradScaler) -> Callable[..., torch.Tensor]:
    def scaled(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
        factor = float("inf") if batch == BAD and rank == world - 1 else 1.0
        return scaler.scale(loss_of(model, rank, batch) * factor)

    return scaled


def scaled(plan: Plan, way: str) -> list[float]:
    """Train under a scaler whose scale halves in step BAD; return it after each step."""
    world = torch.distributed.get_world_size()
    scalers = [torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2) for _ in range(2)]
    # Both have the same scale at all times, so one of them may scale for both.
    both = Twins(lambda: model_of(torch.float32), bad_on_the_last(world, scalers[0]), plan)
    scalers[1].scale(torch.ones(()))
    scales = []
    for step in range(4):
        both.backward(step)
        for scaler, optimizer in zip(scalers, (both.ours, both.theirs), strict=True):
            if way != "plain":
                scaler.unscale_(optimizer)
            if way == "clipped":
                optimizer.clip_grad_norm_(0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        both.compare()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[0].get_scale())
    both.close()
    return scales


@crossed(plan=PLANS, way=("plain", "unscaled", "clipped"), world=(1, 2))
def test_a_step_is_skipped_by_all_when_one_rank_has_an_infinity(
    ranks: Pool, plan: Plan, way: str, world: int
) -> None:
    for scales in ranks(world).run(scaled, plan, way):
        assert scales == [512.0, 256.0, 256.0, 512.0]


def one_shard_is_infinite() -> tuple[float, bool]:
    """Put an infinity where the last rank alone has it; return the scale, and who changed."""
    both = twins(Plan())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(both.stowed, both.rank, 0)).backward()
    before = [whole(p) for p in both.stowed.parameters()]
    if both.rank == both.world - 1:
        next(both.stowed.parameters()).grad.to_local().fill_(float("inf"))
    scaler.step(both.ours)
    scaler.update()
    after = [whole(p) for p in both.stowed.parameters()]
    both.ours.close()
    return scaler.get_scale(), all(map(torch.equal, before, after))


@pytest.mark.parametrize("world", [1, 2])
def test_an_infinity_in_one_shard_stops_every_rank(ranks: Pool, world: int) -> None:
    for scale, unchanged in ranks(world).run(one_shard_is_infinite):
        assert scale == 4.0
        assert unchanged


def scheduled(plan: Plan) -> None:
    both = twins(plan)
    pair: tuple[LRScheduler, LRScheduler] = both.each(
        lambda _, optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=5)
    )
    for step in range(4):
        both.train([step])
        for schedule in pair:
            schedule.step()
    both.close()


@pytest.mark.parametrize("world", [1, 2])
def test_a_schedule_of_learning_rates_is_followed(ranks: Pool, world: int) -> None:
    for overlap in ("none", "forward", "backward"):
        ranks(world).run(scheduled, Plan(overlap=overlap))
