"""The manager of an optimizer's states: who is kept, where, and after what it refuses to go on."""

from pathlib import Path

import pytest
import torch
from torch import nn, optim

from tensorstow.base.errors import OptionError, PoisonedError
from tensorstow.optim.generic.piece_step import Job
from tensorstow.optim.generic.state_manager import StateManager
from tensorstow.optim.generic.stepper import Stepper
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement

LARGE = 40_000


def manager_in(directory: Path, parameters: list[nn.Parameter]) -> tuple[StateManager, Stepper]:
    stepper = Stepper(optim.SGD, [{"params": parameters}], {"momentum": 0.5, "lr": 1.0})
    manager = StateManager(
        stepper,
        Placement(1.0, (directory,), None),
        PipelinePolicy(chunk_elements=16_384),
        elementwise=True,
    )
    manager.attach([(stepper.group_options[0], p) for p in parameters])
    return manager, stepper


def weight(numel: int = LARGE) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.ones(numel)
    return parameter


def step(manager: StateManager, stepper: Stepper, parameters: list[nn.Parameter]) -> None:
    params = [manager.find(p) for p in parameters]
    groups = [{**stepper.group_options[0], "params": parameters}]
    manager.step([Job(groups[0], m, {}, m.parameter) for m in params if m is not None], groups, {})


def test_states_are_read_and_set(tmp_path: Path) -> None:
    params = [weight(), weight()]
    manager, stepper = manager_in(tmp_path, params)
    step(manager, stepper, params)
    first = manager.params()[0]
    assert (manager.read(first)["momentum_buffer"] == 1).all()
    left = manager.put(first, {"momentum_buffer": torch.arange(float(LARGE)), "step": 3})
    assert left == {"step": 3}
    assert torch.equal(manager.read(first)["momentum_buffer"], torch.arange(float(LARGE)))
    manager.forget(first)
    assert manager.read(first) == {}
    assert manager.params()[1].stows


def test_a_member_is_attached_once(tmp_path: Path) -> None:
    params = [weight(), weight(10)]
    manager, stepper = manager_in(tmp_path, params)
    before = manager.params()
    manager.attach([(stepper.group_options[0], p) for p in params])
    assert manager.params() == before
    assert [m.how for m in before] == ["chunks", "ram"]


def test_an_error_within_a_step_poisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [weight()]
    manager, stepper = manager_in(tmp_path, params)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stepper, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(manager, stepper, params)
    with pytest.raises(PoisonedError, match="half updated"):
        manager.wait_written()


def test_without_anything_on_disk_nothing_moves(tmp_path: Path) -> None:
    manager, _ = manager_in(tmp_path, [weight(3)])
    manager.wait_written()
    assert manager.engine is None
    assert manager.traffic().bytes_read == 0
    with pytest.raises(OptionError, match="No piece"):
        manager._moves()
    manager.close()
    with pytest.raises(PoisonedError, match="closed"):
        manager.wait_written()
