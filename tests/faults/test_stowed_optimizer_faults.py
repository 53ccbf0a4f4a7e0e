"""What a user of a stowed class sees when the disk, or the class itself, fails."""

import errno
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from parity.piecewise import CHUNK, pair
from process_counts import open_descriptors
from tensorstow import PipelinePolicy, StowedOptimizer, _native
from tensorstow.base.errors import (
    BudgetError,
    DirectoryError,
    OptimizerError,
    PoisonedError,
    TransferError,
)
from tensorstow.io.engine import BACKENDS, probe_backend

PIECE = 8 * CHUNK  # two states in fp32
PIECES = 6

every_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=pytest.mark.skipif(probe_backend(name) is not None, reason=name))
        for name in BACKENDS
    ],
)
every_error = pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)


class Training:
    """One parameter pulled to zero by a stowed Adam; one step is taken."""

    def __init__(self, directory: Path, backend: str = "threads", pieces: int = PIECES) -> None:
        self.parameter = nn.Parameter(torch.linspace(-1, 1, PIECES * CHUNK))
        self.optimizer = StowedOptimizer(
            optim.Adam,
            [self.parameter],
            states="disk",
            dir=directory,
            ram_budget=pieces * PIECE,
            policy=PipelinePolicy(chunk_elements=CHUNK, backend=backend),  # type: ignore[arg-type]
        )
        self.step()
        self.optimizer.synchronize()

    @property
    def engine(self) -> _native.Engine:
        engine = self.optimizer._manager.engine
        assert engine is not None
        return engine

    def step(self) -> None:
        self.parameter.grad = 2 * self.parameter.detach()
        self.optimizer.step()


def undisturbed(steps: int) -> torch.Tensor:
    parameter = nn.Parameter(torch.linspace(-1, 1, PIECES * CHUNK))
    optimizer = optim.Adam([parameter], foreach=False)
    for _ in range(steps):
        parameter.grad = 2 * parameter.detach()
        optimizer.step()
    return parameter.detach()


def assert_poisoned(training: Training, cause: BaseException) -> None:
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
    training = Training(tmp_path, backend, pieces=2)
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
        training = Training(tmp_path, backend)
        training.engine.inject_fault("write", times=1, delay_us=int(delay * 1e6))
        training.engine.inject_fault("write", after=2, error=errno.EIO)
        with suppress(TransferError):
            training.step()
            break
    assert torch.equal(training.parameter.detach(), undisturbed(2))
    time.sleep(4 * delay)
    with pytest.raises(TransferError, match="write") as caught:
        getattr(training.optimizer, use)()
    assert_poisoned(training, caught.value)


def test_a_write_that_fails_while_step_waits_for_room(tmp_path: Path) -> None:
    training = Training(tmp_path, pieces=2)
    training.engine.inject_fault("write", error=errno.ENOSPC)
    with pytest.raises(TransferError, match="larger") as caught:
        training.step()
    assert_poisoned(training, caught.value)


@every_backend
@pytest.mark.parametrize("operation", ["read", "write"])
def test_short_transfers_are_finished(tmp_path: Path, backend: str, operation: str) -> None:
    training = Training(tmp_path, backend)
    training.engine.inject_fault(operation, times=-1, max_bytes=4096)
    for _ in range(2):
        training.step()
    training.optimizer.synchronize()
    training.engine.clear_faults()
    training.step()
    assert torch.equal(training.parameter.detach(), undisturbed(4))


def test_one_failure_leaves_others_alone(tmp_path: Path) -> None:
    broken, healthy = Training(tmp_path), Training(tmp_path)
    broken.engine.inject_fault("read", error=errno.EIO)
    with pytest.raises(TransferError):
        broken.step()
    healthy.step()
    assert torch.equal(healthy.parameter.detach(), undisturbed(2))


def test_a_state_dict_that_cannot_be_read(tmp_path: Path) -> None:
    training = Training(tmp_path)
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


@pytest.mark.usefixtures("garbage_apart")
def test_a_disk_that_is_full_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(_native, "fallocate", lambda _fd, _length: errno.ENOSPC)
    with pytest.raises(DirectoryError, match="No space left"):
        Training(tmp_path)
    assert open_descriptors() == before


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
