"""Values of a checkpoint that no engine can continue with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tensorstow import AdamW, StowedOptimizer
from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.deepspeed.checkpoint.saved_values import (
    check_options,
    check_scheduler,
    check_states,
    checking,
    counts_in,
)


def test_counters_are_whole_numbers() -> None:
    assert counts_in({"steps": 3, "other": "x"}, ["steps"]) == {"steps": 3}
    for value in (-1, 1.5, "3", None, True):
        with pytest.raises(OptionError, match="steps="):
            counts_in({"steps": value}, ["steps"])


def test_the_file_is_named(tmp_path: Path) -> None:
    for error in (OptionError("lr=x."), KeyError("lr")):
        with (
            pytest.raises(StoreFormatError, match=rf"{tmp_path}.*Load another"),
            checking(tmp_path),
        ):
            raise error


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"lr": -1.0}, "lr=-1.0"), ({"maximize": "x"}, "maximize"), ({"eps": None}, "eps=None")],
)
def test_options_of_adam_are_those_that_it_steps_with(changed: dict[str, Any], said: str) -> None:
    optimizer = AdamW([torch.nn.Parameter(torch.ones(2))])
    saved = [{**group, "params": ["a"]} for group in optimizer.param_groups]
    check_options(optimizer, saved)
    with pytest.raises(OptionError, match=said):
        check_options(optimizer, [{**saved[0], **changed}])
    optimizer.close()


def test_options_of_other_classes_stay_numbers() -> None:
    optimizer = StowedOptimizer(torch.optim.SGD, [torch.nn.Parameter(torch.ones(2))], lr=0.1)
    check_options(optimizer, [{"lr": torch.tensor(0.5), "momentum": 1}])
    for value in ("x", None, float("nan"), [0.1]):
        with pytest.raises(OptionError, match=r"momentum=.*must be a number"):
            check_options(optimizer, [{"momentum": value}])
    optimizer.close()


def test_a_plateau_that_has_seen_nothing_is_loaded() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([parameter], lr=0.1))
    check_scheduler(schedule, schedule.state_dict())  # its best is infinite
    with pytest.raises(OptionError, match="best='x'"):
        check_scheduler(schedule, {"best": "x"})
    with pytest.raises(OptionError, match="the scheduler's state"):
        check_scheduler(schedule, 5)


def test_states_have_the_shape_of_their_parameter() -> None:
    parameter = torch.ones(2, 3)
    whole = {"step": 1.0, "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3)}
    check_states(parameter, whole, "a", amsgrad=False)
    check_states(parameter, {"step": 0.0, "master": torch.ones(2, 3)}, "a", amsgrad=False)
    for entry, said in (
        ({"step": 1.0}, "no 'exp_avg'"),
        ({**whole, "exp_avg": torch.ones(3, 2)}, r"'exp_avg' of a is \(3, 2\)"),
        ({**whole, "exp_avg_sq": torch.ones(2, 3).long()}, "int64"),
    ):
        with pytest.raises(OptionError, match=said):
            check_states(parameter, entry, "a", amsgrad=False)
