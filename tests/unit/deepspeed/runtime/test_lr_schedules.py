"""Learning rates against formulas written out by hand, by steps taken."""

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.runtime.lr_schedules import (
    LRRangeTest,
    LRSchedule,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)


def adam(*rates: float) -> Optimizer:
    return Adam([{"params": [torch.ones(1)], "lr": rate} for rate in rates or (0.1,)])


def first(schedule: LRSchedule, count: int) -> list[float]:
    return [schedule._lrs_after(n)[0] for n in range(count)]


def test_warmup_by_log() -> None:
    schedule = WarmupLR(adam(), warmup_min_lr=0.01, warmup_max_lr=0.05, warmup_num_steps=4)
    rise = [0.0, 0.0, math.log(2) / math.log(4), math.log(3) / math.log(4), 1.0, 1.0, 1.0]
    assert first(schedule, 7) == pytest.approx([0.01 + 0.04 * share for share in rise])


def test_warmup_linearly() -> None:
    schedule = WarmupLR(adam(), 0.0, 0.8, 4, "linear")
    assert first(schedule, 7) == pytest.approx([0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.8])


def test_warmup_goes_up_to_the_optimizers_rates_by_itself() -> None:
    schedule = WarmupLR(adam(0.1, 0.3), warmup_min_lr=[0.0, 0.1], warmup_num_steps=2)
    assert schedule._lrs_after(0) == [0.0, 0.1]
    assert schedule._lrs_after(9) == pytest.approx([0.1, 0.3])


def test_decay_goes_down_linearly_after_the_warmup() -> None:
    schedule = WarmupDecayLR(
        adam(),
        total_num_steps=7,
        warmup_min_lr=0.1,
        warmup_max_lr=1.1,
        warmup_num_steps=3,
        warmup_type="linear",
    )
    share = [0, 0, 1 / 3, 2 / 3, 4 / 4, 3 / 4, 2 / 4, 1 / 4, 0, 0]
    assert first(schedule, 10) == pytest.approx([0.1 + s for s in share])


def test_cosine_goes_down_to_its_least_share() -> None:
    schedule = WarmupCosineLR(
        adam(2.0),
        total_num_steps=6,
        warmup_min_ratio=0.5,
        warmup_num_steps=2,
        cos_min_ratio=0.1,
        warmup_type="linear",
    )
    falling = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 2, 3, 4)]
    shares = [0.0, 0.5, 0.75, *falling, 0.1]
    assert first(schedule, 8) == pytest.approx([2.0 * share for share in shares])


def test_a_range_test_rises_without_end() -> None:
    options: dict[str, Any] = {
        "lr_range_test_min_lr": 0.1,
        "lr_range_test_step_size": 2,
        "lr_range_test_step_rate": 3.0,
    }
    assert first(LRRangeTest(adam(), **options), 5) == pytest.approx([0.1, 0.25, 0.4, 0.55, 0.7])
    stairs = LRRangeTest(adam(), **options, lr_range_test_staircase=True)
    assert first(stairs, 5) == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.7])


def test_one_cycle_rises_falls_and_decays() -> None:
    schedule = OneCycle(
        adam(),
        cycle_min_lr=1.0,
        cycle_max_lr=3.0,
        cycle_first_step_size=2,
        cycle_second_step_size=4,
        decay_step_size=2,
        decay_lr_rate=0.5,
    )
    cycle = [1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0]
    decay = [1 / (1 + 0.5 * 0.5), 1 / (1 + 0.5 * 1.0)]
    assert first(schedule, 9) == pytest.approx([*cycle, *decay])


def test_one_cycle_stays_at_the_least_where_nothing_decays() -> None:
    schedule = OneCycle(adam(), cycle_min_lr=1.0, cycle_max_lr=2.0, cycle_first_step_size=1)
    assert first(schedule, 6) == [1.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def test_one_cycle_in_stairs() -> None:
    schedule = OneCycle(
        adam(),
        cycle_min_lr=0.0,
        cycle_max_lr=1.0,
        cycle_first_step_size=4,
        cycle_first_stair_count=2,
    )
    assert first(schedule, 9) == [0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0]


def test_momentum_goes_the_other_way() -> None:
    schedule = OneCycle(
        adam(),
        cycle_min_lr=0.0,
        cycle_max_lr=1.0,
        cycle_first_step_size=2,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
        decay_step_size=1,
        decay_mom_rate=0.01,
    )
    found = [(schedule._betas_after(n) or [])[0] for n in range(6)]
    momenta = [0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.01]
    assert [beta for beta, _ in found] == pytest.approx(momenta)
    assert {second for _, second in found} == {0.99}


def test_momentum_is_left_alone_where_it_is_not_cycled_or_not_there() -> None:
    options: dict[str, Any] = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0}
    assert OneCycle(adam(), **options, cycle_momentum=False).get_mom() is None
    cycled = OneCycle(adam(), **options)
    cycled.step(3)
    assert cycled.get_mom() == [group["betas"] for group in cycled.optimizer.param_groups]
    assert OneCycle(SGD([torch.ones(1)]), **options)._betas_after(0) is None


def test_a_warmup_of_one_step_is_one_of_two() -> None:
    schedule = WarmupLR(adam(), 0.0, 1.0, 1)
    assert first(schedule, 4) == [0.0, 0.0, 1.0, 1.0]


def test_values_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="warmup_type='cubic'"):
        WarmupLR(adam(), warmup_type="cubic")
    with pytest.raises(OptionError, match=r"warmup_num_steps=1\.5"):
        WarmupLR(adam(), warmup_num_steps=1.5)
    with pytest.raises(OptionError, match="warmup_num_steps=None was given"):
        WarmupLR(adam(), warmup_num_steps=None)
    with pytest.raises(OptionError, match="at least 0"):
        OneCycle(adam(), cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_second_step_size=-1)
    with pytest.raises(OptionError, match="has 3 values, and the optimizer 1"):
        WarmupLR(adam(), warmup_min_lr=[1.0, 2.0, 3.0])


def test_a_step_may_be_named_as_upstream_names_it() -> None:
    named, counted = warm_up(), warm_up()
    for number in range(4):
        counted.step()
        assert counted.last_batch_iteration == number
    named.step(3)
    assert named.get_last_lr() == counted.get_last_lr() == [0.1 * math.log(4) / math.log(10)]
    named.step(last_batch_iteration=1)
    assert named.get_last_lr() == [0.1 * math.log(2) / math.log(10)]
    named.last_batch_iteration = 2
    named.step()
    assert named.get_last_lr() == counted.get_last_lr()


def warm_up() -> WarmupLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = WarmupLR(optimizer, warmup_num_steps=10)
    optimizer.step()
    return schedule


def test_a_rate_that_is_a_tensor_is_written_to() -> None:
    rate = torch.full((1,), 0.1, dtype=torch.float64)
    schedule = WarmupLR(SGD([torch.ones(1)], lr=rate), warmup_num_steps=10)
    schedule.step(1)
    assert schedule.optimizer.param_groups[0]["lr"] is rate
    assert rate.tolist() == pytest.approx([0.1 * math.log(2) / math.log(10)])


def test_schedules_say_what_they_were_given() -> None:
    warm = WarmupLR(adam(0.1, 0.2), warmup_min_lr=[0.0, 0.01], warmup_num_steps=1)
    assert (warm.min_lrs, warm.max_lrs) == ([0.0, 0.01], [0.1, 0.2])
    assert (warm.warmup_num_steps, warm.warmup_type) == (2, "log")
    cycle = OneCycle(adam(), 0.1, 0.3, cycle_first_step_size=3, cycle_second_step_size=1)
    assert (cycle.min_lrs, cycle.max_lrs) == ([0.1], [0.3])
    assert (cycle.step_ratio, cycle.total_size) == (0.75, 4)
    cosine = WarmupCosineLR(adam(), 100, warmup_num_steps=4, warmup_type="linear")
    assert cosine.get_lr_ratio() == 0.0
    cosine.step(1)
    assert cosine.get_lr_ratio() == 0.25


def test_momentum_before_the_first_step_is_said_as_upstream_says_it() -> None:
    cycle = OneCycle(adam(), 0.0, 1.0, cycle_first_step_size=2)
    assert cycle.get_mom() == [(0.9, 0.99)]
    assert cycle.optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    cycle.step(1)
    assert cycle.get_mom() == [(0.8, 0.99)]
