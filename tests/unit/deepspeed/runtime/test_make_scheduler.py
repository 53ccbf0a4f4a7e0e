"""A named schedule drives an optimizer, and goes on from a checkpoint."""

from inspect import signature
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LRScheduler

import tensorstow
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import Named
from tensorstow.deepspeed.runtime import lr_schedules
from tensorstow.deepspeed.runtime.lr_schedules import SCHEDULES, make_scheduler

LINEAR = Named(
    "WarmupLR",
    {"warmup_min_lr": 0, "warmup_max_lr": 0.8, "warmup_num_steps": 4, "warmup_type": "linear"},
)
CYCLE = Named("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 2})


def adamw(cls: type = AdamW) -> Any:  # noqa: ANN401  # torch's or ours
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    return cls([weight], lr=0.1)


@pytest.mark.parametrize("cls", [AdamW, tensorstow.AdamW])
def test_it_sets_the_rate_behind_each_step(cls: type) -> None:
    optimizer = adamw(cls)
    scheduler = make_scheduler(LINEAR, optimizer)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.0, 0.0, 0.2, 0.4, 0.6, 0.8])
    assert scheduler.get_last_lr() == pytest.approx([0.8])
    assert isinstance(scheduler, LRScheduler)


def test_a_cycle_sets_betas_too() -> None:
    optimizer = adamw()
    scheduler = make_scheduler(CYCLE, optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["betas"] == pytest.approx((0.85, 0.99))


@pytest.mark.parametrize("named", [LINEAR, CYCLE])
def test_it_goes_on_from_a_checkpoint(named: Named) -> None:
    optimizer, resumed = adamw(), adamw()
    scheduler = make_scheduler(named, optimizer)
    assert scheduler.state_dict() == {"last_batch_iteration": -1}
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert scheduler.state_dict() == {"last_batch_iteration": 2}
    other = make_scheduler(named, resumed)
    other.load_state_dict(scheduler.state_dict())
    for _ in range(3):
        assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert resumed.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
        assert other.get_last_lr() == scheduler.get_last_lr()
        for o, s in ((optimizer, scheduler), (resumed, other)):
            o.step()
            s.step()


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        (
            "StepRL",
            {},
            "scheduler.type='StepRL' was given: it must be one of LRRangeTest, OneCycle",
        ),
        ("LRScheduler", {}, "or a class of torch.optim.lr_scheduler"),
        ("warnings", {}, "or a class of torch.optim.lr_scheduler"),
        ("StepLR", {}, "StepLR lacks step_size"),
        ("StepLR", {"step_size": 1, "gama": 1}, "StepLR has gama. It takes step_size, gamma"),
        ("LinearLR", {"start_factor": 2.0}, "torch's LinearLR refuses: Starting mult"),
        ("WarmupDecayLR", {}, "lacks total_num_steps"),
        ("WarmupLR", {"warmup_steps": 3}, "has warmup_steps"),
        ("WarmupLR", {"last_batch_iteration": 3}, "load_checkpoint"),
        ("WarmupLR", {"warmup_min_lr": "0.1"}, "warmup_min_lr='0.1' was given: it is a number"),
        ("WarmupLR", {"warmup_min_lr": ["0"]}, "warmup_min_lr[0]='0' was given: it is a number"),
        ("WarmupLR", {"warmup_type": 1}, "it is a text"),
        ("WarmupLR", {"warmup_num_steps": True}, "it is a number"),
        ("WarmupLR", {"warmup_num_steps": float("nan")}, "warmup_num_steps=nan"),
        ("WarmupLR", {"warmup_max_lr": 1e308}, "warmup_max_lr=1e+308"),
        ("StepLR", {"step_size": "3"}, "step_size='3' was given: it is a whole number"),
        ("StepLR", {"step_size": 0}, "torch's StepLR refuses"),
        ("StepLR", {"step_size": 3, "gamma": 10**400}, "gamma=1000"),
        ("MultiStepLR", {"milestones": "12"}, "milestones='12' was given: it is a list"),
        ("LambdaLR", {"lr_lambda": "x"}, "lr_lambda='x' was given"),
        ("LRRangeTest", {"lr_range_test_staircase": 2}, "it is True or False"),
    ],
)
def test_what_it_does_not_know_is_refused(kind: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        make_scheduler(Named(kind, params), adamw())
    assert said in str(caught.value)


def test_torchs_own_are_taken_by_name() -> None:
    optimizer = adamw(tensorstow.AdamW)
    scheduler = make_scheduler(Named("StepLR", {"step_size": 1, "gamma": 0.5}), optimizer)
    assert type(scheduler) is torch.optim.lr_scheduler.StepLR
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.25)


def test_nulls_and_the_start_are_as_good_as_absent() -> None:
    named = Named("WarmupLR", {"warmup_max_lr": None, "last_batch_iteration": -1})
    assert make_scheduler(named, adamw()).get_last_lr() == [0.0]


def test_all_of_deepspeeds_names_are_there() -> None:
    assert set(SCHEDULES) == set(lr_schedules.VALID_LR_SCHEDULES)
    assert {*SCHEDULES, "VALID_LR_SCHEDULES"} <= set(lr_schedules.__all__)
    assert all(getattr(lr_schedules, name) is cls for name, cls in SCHEDULES.items())


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("LRRangeTest", "min_lr step_size step_rate staircase"),
        ("WarmupLR", "min_lr max_lr num_steps type"),
        ("WarmupDecayLR", "total_num_steps min_lr max_lr num_steps type"),
        ("WarmupCosineLR", "total_num_steps min_ratio num_steps cos_min_ratio type"),
    ],
)
def test_they_are_made_by_hand_with_upstreams_signature(name: str, names: str) -> None:
    prefix = "lr_range_test_" if name == "LRRangeTest" else "warmup_"
    whole = [n if n.startswith(("total", "cos")) else prefix + n for n in names.split()]
    parameters = signature(SCHEDULES[name]).parameters
    assert list(parameters) == ["optimizer", *whole, "last_batch_iteration"]


def test_one_made_by_hand_is_the_one_of_the_json() -> None:
    by_hand = lr_schedules.OneCycle(adamw(), 0.1, 0.3, 0.0, 2)
    of_json = make_scheduler(CYCLE, adamw())
    for _ in range(6):
        for one in (by_hand, of_json):
            one.optimizer.step()
            one.step()
        assert by_hand.get_last_lr() == of_json.get_last_lr()


def test_one_made_by_hand_may_begin_behind_any_step() -> None:
    optimizer = adamw()
    scheduler = lr_schedules.WarmupLR(optimizer, 0.0, 0.8, 4, "linear", last_batch_iteration=2)
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == pytest.approx(0.4)
    optimizer.step()
    scheduler.step()
    assert scheduler.state_dict() == {"last_batch_iteration": 3}


def test_a_schedule_is_rehearsed_over_other_parameters() -> None:
    optimizer = adamw(tensorstow.AdamW)
    before = dict(optimizer.param_groups[0])
    with pytest.raises(OptionError, match="StepLR refuses"):
        make_scheduler(Named("StepLR", {"step_size": 0}), optimizer)
    assert optimizer.param_groups[0].keys() == before.keys()
    named = Named("OneCycleLR", {"max_lr": 0.5, "total_steps": 1e1})
    assert make_scheduler(named, optimizer).total_steps == 10
