"""Schedules with warmup: those of upstream, step by step, also over a placed model."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from tensorstow.base.errors import OptionError
from tensorstow.colossalai import HybridAdam
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import LowLevelZeroPlugin
from tensorstow.colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR, LinearWarmupLR

Make = Callable[[torch.optim.Optimizer], LRScheduler]


def sgd(*rates: float) -> torch.optim.SGD:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def rates_of(make: Make, steps: int, *rates: float) -> list[list[float]]:
    optimizer = sgd(*rates)
    schedule = make(optimizer)
    seen = []
    for _ in range(steps):
        assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        seen.append(schedule.get_last_lr())
        optimizer.step()
        schedule.step()
    return seen


def test_a_cosine_follows_the_warmup() -> None:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return CosineAnnealingWarmupLR(optimizer, total_steps=10, warmup_steps=4, eta_min=0.1)

    seen = rates_of(make, 11, 1.0, 2.0)
    assert seen[:4] == [[0.25, 0.5], [0.5, 1.0], [0.75, 1.5], [1.0, 2.0]]
    after = rates_of(lambda optimizer: CosineAnnealingLR(optimizer, 6, eta_min=0.1), 7, 1.0, 2.0)
    for ours, theirs in zip(seen[4:], after, strict=True):
        assert ours == pytest.approx(theirs)
    assert seen[10] == pytest.approx([0.1, 0.1])


def test_a_line_follows_the_warmup() -> None:
    seen = rates_of(lambda optimizer: LinearWarmupLR(optimizer, 10, warmup_steps=3), 11, 1.0)
    want = [0.25, 0.5, 0.75, *((10 - step) / 7 for step in range(3, 11))]
    assert [rate for (rate,) in seen] == pytest.approx(want)


@pytest.mark.parametrize("kind", [CosineAnnealingWarmupLR, LinearWarmupLR])
def test_without_warmup_the_first_rate_is_the_whole(kind: Callable[..., LRScheduler]) -> None:
    assert rates_of(lambda optimizer: kind(optimizer, 4), 1, 3.0) == [[3.0]]


@pytest.mark.parametrize("kind", [CosineAnnealingWarmupLR, LinearWarmupLR])
@pytest.mark.parametrize("warmup", [-1, 4, 5])
def test_a_warmup_that_leaves_no_steps_is_refused(
    kind: Callable[..., LRScheduler], warmup: int
) -> None:
    with pytest.raises(OptionError, match=f"warmup_steps={warmup} was given with total_steps=4"):
        kind(sgd(1.0), 4, warmup)


def test_a_schedule_is_saved_and_moved_to_a_placed_model() -> None:
    model = nn.Linear(2, 2)
    optimizer = HybridAdam(model.parameters(), lr=1.0)
    schedule = CosineAnnealingWarmupLR(optimizer, 6, warmup_steps=2)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
    _, placed, *_, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
    for _ in range(3):
        placed.step()
        schedule.step()
    want = (1 + math.cos(math.pi / 4)) / 2
    assert [group["lr"] for group in placed.param_groups] == pytest.approx([want])
    again = CosineAnnealingWarmupLR(sgd(1.0), 6, warmup_steps=2)
    again.load_state_dict(schedule.state_dict())
    assert again.get_last_lr() == schedule.get_last_lr()
