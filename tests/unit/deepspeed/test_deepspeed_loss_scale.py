"""The loss scale halves at overflows, after hysteresis, and doubles after a window."""

import json

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import Fp16
from tensorstow.deepspeed.loss_scale import LossScale


def scales(settings: Fp16, steps: str) -> list[float]:
    """Return the scale after each step: "x" overflowed, "." did not."""
    scale, found = LossScale(settings), []
    for step in steps:
        scale.update(overflowed=step == "x")
        found.append(scale.scale)
    return found


def test_a_static_scale_never_moves() -> None:
    assert scales(Fp16(loss_scale=128.0), "x.x.x") == [128.0] * 5


def test_it_begins_at_a_power_of_two() -> None:
    assert LossScale(Fp16()).scale == 65536.0


def test_without_hysteresis_each_overflow_halves() -> None:
    settings = Fp16(initial_scale_power=4, hysteresis=1)
    assert scales(settings, "xx.x") == [8.0, 4.0, 4.0, 2.0]


def test_hysteresis_lets_overflows_pass_and_then_every_one_halves() -> None:
    settings = Fp16(initial_scale_power=4, hysteresis=3)
    assert scales(settings, "x.xx.x") == [16.0, 16.0, 16.0, 8.0, 8.0, 4.0]


def test_consecutive_hysteresis_is_restored_by_a_good_step() -> None:
    settings = Fp16(initial_scale_power=4, hysteresis=2, consecutive_hysteresis=True)
    assert scales(settings, "x.x.xx") == [16.0, 16.0, 16.0, 16.0, 16.0, 8.0]


def test_a_window_of_good_steps_doubles_and_restores_hysteresis() -> None:
    settings = Fp16(initial_scale_power=2, loss_scale_window=2, hysteresis=2)
    assert scales(settings, "...x...xx") == [4.0, 4.0, 8.0, 8.0, 8.0, 8.0, 16.0, 16.0, 8.0]


def test_windows_follow_each_other() -> None:
    settings = Fp16(initial_scale_power=0, loss_scale_window=2)
    assert scales(settings, ".....") == [1.0, 1.0, 2.0, 2.0, 4.0]


def test_an_overflow_begins_the_window_anew() -> None:
    settings = Fp16(initial_scale_power=2, loss_scale_window=3, hysteresis=9)
    assert scales(settings, "...x....") == [4.0] * 7 + [8.0]


def test_at_the_minimum_an_overflow_is_an_error() -> None:
    scale = LossScale(Fp16(initial_scale_power=1, hysteresis=1))
    scale.update(overflowed=True)
    assert scale.scale == 1.0
    with pytest.raises(OptionError, match=r"min_loss_scale=1\.0"):
        scale.update(overflowed=True)


def test_a_start_below_the_minimum_is_refused() -> None:
    with pytest.raises(OptionError, match="initial_scale_power=0"):
        LossScale(Fp16(initial_scale_power=0, min_loss_scale=2.0))


def test_a_checkpoint_goes_on_where_it_was() -> None:
    settings = Fp16(initial_scale_power=4, loss_scale_window=3, hysteresis=2)
    first, second = LossScale(settings), LossScale(settings)
    for step in "..x.":
        first.update(overflowed=step == "x")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in "..x":
        first.update(overflowed=step == "x")
        second.update(overflowed=step == "x")
        assert second.state_dict() == first.state_dict()


def test_a_static_scale_is_not_loaded() -> None:
    scale = LossScale(Fp16(loss_scale=8.0))
    scale.load_state_dict(LossScale(Fp16()).state_dict())
    assert scale.scale == 8.0


def test_scripts_read_it_by_upstream_s_names() -> None:
    scale = LossScale(Fp16(initial_scale_power=1, loss_scale_window=3))
    for number in range(5):
        assert (scale.cur_iter, scale.scale_window) == (number, 3)
        scale.update(overflowed=False)
    assert scale.cur_scale == scale.loss_scale == scale.scale == 4.0
    again = LossScale(Fp16())
    again.load_state_dict(scale.state_dict())
    assert (again.cur_iter, again.cur_scale) == (5, 4.0)
