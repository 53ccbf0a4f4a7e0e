"""What a user of a stowed class sees when the disk, or the class itself, fails."""

import errno
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from parity.piecewise import pair
from parity.quadratic import (
    PIECE,
    PIECES,
    PiecewiseTraining,
    every_backend,
    every_error,
    piecewise_undisturbed,
)
from tensorstow import StowedOptimizer
from tensorstow.base.errors import BudgetError, OptimizerError, PoisonedError, TransferError


def assert_poisoned(training: PiecewiseTraining, cause: BaseException) -> None:
    before = training.parameter.detach().clone()
    optimizer = training.optimizer
    for use in (optimizer.step, optimizer.synchronize, optimizer.state_dict):
        with pytest.raises(PoisonedError, match="checkpoint") as caught:
            use()
        assert caught.value.__cause__ is cause
    assert torch.equal(training.parameter.detach(), before)
    optimizer.close()


@every_backend
@every_error
@pytest.mark.parametrize("after", [0, 3])
def test_a_read_that_fails(tmp_path: Path, backend: str, code: int, after: int) -> None:
    training = PiecewiseTraining(tmp_path, backend, pieces=2)
    training.engine.inject_fault("read", after=after, error=code)
    with pytest.raises(TransferError) as caught:
        training.step()
    error = caught.value
    assert (error.operation, error.errno, error.length) == ("read", code, PIECE)
    assert error.offset in range(0, PIECES * PIECE, PIECE)
    assert error.path.startswith(str(tmp_path))
    assert error.advice in str(error)
    assert_poisoned(training, error)


@every_backend
@pytest.mark.parametrize("use", ["step", "synchronize", "state_dict"])
def test_a_write_that_fails_behind_step_surfaces_next(
    tmp_path: Path, backend: str, use: str
) -> None:
    for delay in (0.05, 1.0, 5.0):  # so that step() is over before, also beside other processes
        training = PiecewiseTraining(tmp_path, backend)
        training.engine.inject_fault("write", times=1, delay_us=int(delay * 1e6))
        training.engine.inject_fault("write", after=2, error=errno.EIO)
        with suppress(TransferError):
            training.step()
            break
    assert torch.equal(training.parameter.detach(), piecewise_undisturbed(2))
    time.sleep(4 * delay)
    with pytest.raises(TransferError, match="write") as caught:
        getattr(training.optimizer, use)()
    assert_poisoned(training, caught.value)


def test_a_write_that_fails_while_step_waits_for_room(tmp_path: Path) -> None:
    training = PiecewiseTraining(tmp_path, pieces=2)
    training.engine.inject_fault("write", error=errno.ENOSPC)
    with pytest.raises(TransferError, match="larger") as caught:
        training.step()
    assert_poisoned(training, caught.value)


def test_a_state_dict_that_cannot_be_read(tmp_path: Path) -> None:
    training = PiecewiseTraining(tmp_path)
    training.engine.inject_fault("read", after=1, error=errno.EIO)
    with pytest.raises(TransferError) as caught:
        training.optimizer.state_dict()
    assert_poisoned(training, caught.value)


class FailsOnce(optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["lr"] == 13:
            message = "an unlucky number"
            raise ArithmeticError(message)
        super().step(closure)


def test_a_class_that_raises_in_the_middle(tmp_path: Path) -> None:
    both = pair(tmp_path, FailsOnce, {"momentum": 0.9}, per_parameter=True)
    both.step(1)
    both.ours.param_groups[0]["lr"] = 13
    with pytest.raises(OptimizerError, match="FailsOnce took a step, and raised") as caught:
        both.ours.step()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    both.ours.param_groups[0]["lr"] = 1
    with pytest.raises(PoisonedError) as poisoned:
        both.ours.step()
    assert poisoned.value.__cause__ is caught.value


def test_states_that_turn_up_later_and_do_not_fit(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(100, 1000))
    optimizer = StowedOptimizer(
        SlyMuon,
        [weight],
        states="disk",
        dir=tmp_path,
        ram_budget="100KiB",
        lr=0.1,
        per_parameter=True,
    )
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(BudgetError, match="largest piece"):
        optimizer.step()
    with pytest.raises(PoisonedError):
        optimizer.step()


class SlyMuon(optim.Optimizer):
    """Begins to keep something once its learning rate is high."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if group["lr"] > 0.1:
                    self.state[p]["sum"] = p.grad.clone()
                p.sub_(p.grad)
