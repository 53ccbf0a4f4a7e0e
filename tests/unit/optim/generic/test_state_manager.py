"""The keeper of an optimizer's states: who is kept, where, and after what it refuses to go on."""

from pathlib import Path

import pytest
import torch
from torch import nn, optim

from tensorstow.base.errors import OptionError, PoisonedError
from tensorstow.optim.generic.piece_step import Job
from tensorstow.optim.generic.state_manager import Keeper
from tensorstow.optim.generic.stepper import Stepper
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement

LARGE = 40_000


def keeper_in(directory: Path, parameters: list[nn.Parameter]) -> tuple[Keeper, Stepper]:
    stepper = Stepper(optim.SGD, [{"params": parameters}], {"momentum": 0.5, "lr": 1.0})
    keeper = Keeper(
        stepper,
        Placement(1.0, (directory,), None),
        PipelinePolicy(chunk_elements=16_384),
        elementwise=True,
    )
    keeper.attach([(stepper.group_options[0], p) for p in parameters])
    return keeper, stepper


def weight(numel: int = LARGE) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.ones(numel)
    return parameter


def step(keeper: Keeper, stepper: Stepper, parameters: list[nn.Parameter]) -> None:
    members = [keeper.find(p) for p in parameters]
    groups = [{**stepper.group_options[0], "params": parameters}]
    keeper.take_turn([Job(groups[0], m, {}) for m in members if m is not None], groups, {})


def test_states_are_read_and_set(tmp_path: Path) -> None:
    params = [weight(), weight()]
    keeper, stepper = keeper_in(tmp_path, params)
    step(keeper, stepper, params)
    first = keeper.members()[0]
    assert (keeper.read(first)["momentum_buffer"] == 1).all()
    left = keeper.put(first, {"momentum_buffer": torch.arange(float(LARGE)), "step": 3})
    assert left == {"step": 3}
    assert torch.equal(keeper.read(first)["momentum_buffer"], torch.arange(float(LARGE)))
    keeper.forget(first)
    assert keeper.read(first) == {}
    assert keeper.members()[1].stows


def test_a_member_is_attached_once(tmp_path: Path) -> None:
    params = [weight(), weight(10)]
    keeper, stepper = keeper_in(tmp_path, params)
    before = keeper.members()
    keeper.attach([(stepper.group_options[0], p) for p in params])
    assert keeper.members() == before
    assert [m.how for m in before] == ["chunks", "ram"]


def test_an_error_within_a_step_poisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [weight()]
    keeper, stepper = keeper_in(tmp_path, params)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stepper, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(keeper, stepper, params)
    with pytest.raises(PoisonedError, match="half updated"):
        keeper.settle()


def test_without_anything_on_disk_nothing_moves(tmp_path: Path) -> None:
    keeper, _ = keeper_in(tmp_path, [weight(3)])
    keeper.settle()
    assert keeper.engine is None
    assert keeper.traffic().bytes_read == 0
    with pytest.raises(OptionError, match="No piece"):
        keeper._moving()
    keeper.close()
    with pytest.raises(PoisonedError, match="closed"):
        keeper.settle()
