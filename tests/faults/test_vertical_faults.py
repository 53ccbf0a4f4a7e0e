"""Vertical order with weights and activations on disk: disks that fail, exceptions, and kills."""

import errno
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import children
from attacks.faults import Faults
from models import FeedForward
from tensorstow import AdamW, Plan, stow
from tensorstow.base.errors import DirectoryError, OptionError, PoisonedError, TransferError
from tensorstow.fsdp.placed_activations import PlacedActivations
from tensorstow.fsdp.report import ParameterPart
from tensorstow.optim.stowed_adam import StowedAdam

WIDTH, ROWS, BATCH = 128, 48, 8  # what a micro-batch of two samples saves has 48 KiB
PLAN = Plan(
    "disk", "host", micro_batches=4, activations="disk", activation_ram_budget=0, prefetch=1
)
SCRATCH = partial(AdamW, lr=1e-2, durability="none")
Made = tuple[nn.Module, StowedAdam]


class Block(FeedForward):
    """Calls ``before`` in each forward, and ``beside`` in each backward."""

    before: Callable[[], object] = int
    beside: Callable[[], object] = int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.before()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self._in_backward)
        return y

    @staticmethod
    def _in_backward(_: torch.Tensor) -> None:
        Block.beside()


@contextmanager
def made(directory: Path, plan: Plan = PLAN) -> Iterator[Made]:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(WIDTH) for _ in range(5)))
    model, optimizer = stow(net, SCRATCH, plan=plan, dir=directory)
    try:
        yield model, optimizer
    finally:
        optimizer.close()


def passes(model: nn.Module, seed: int) -> None:
    x = torch.randn(BATCH, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


def step(model: nn.Module, optimizer: StowedAdam, seed: int) -> None:
    passes(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def part_of(optimizer: StowedAdam, kind: type) -> Any:  # noqa: ANN401
    (part,) = [p for each in optimizer._recorded_parts if isinstance(p := each(), kind)]
    return part


def engine_of_activations(optimizer: StowedAdam) -> Any:  # noqa: ANN401
    return part_of(optimizer, PlacedActivations)._offloads[0]._pool._scratch.engine


@pytest.fixture(scope="module")
def wanted() -> dict[str, torch.Tensor]:
    """Return the weights behind two steps without a fault, everything in memory."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(WIDTH) for _ in range(5)))
    model, optimizer = stow(net, SCRATCH, plan=Plan(micro_batches=4))
    with optimizer:
        for seed in range(2):
            step(model, optimizer, seed)
        optimizer.wait()
        return weights(model)


def goes_on(made_: Made, wanted: dict[str, torch.Tensor]) -> None:
    """Take the step that failed anew; its weights are those of a run without a fault."""
    model, optimizer = made_
    optimizer.zero_grad()
    gc.collect()  # the exception's frames have the graph
    step(model, optimizer, 1)
    optimizer.wait()
    found = weights(model)
    assert {name for name in wanted if not torch.equal(found[name], wanted[name])} == set()
    del found
    gc.collect()
    engine_of_activations(optimizer).drain()
    assert part_of(optimizer, PlacedActivations).disk_bytes() == 0


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_a_full_disk_in_forward_is_told_and_the_step_is_taken_anew(
    tmp_path: Path, overlap: str, wanted: dict[str, torch.Tensor]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, tmp_path)
        with made(tmp_path, PLAN.but(overlap=overlap)) as (model, optimizer):
            faults.is_full = True
            with pytest.raises(DirectoryError, match=str(tmp_path)):
                passes(model, 0)  # its activations are the first that need room
            faults.is_full = False
            optimizer.zero_grad()
            gc.collect()
            step(model, optimizer, 0)
            goes_on((model, optimizer), wanted)


@pytest.mark.parametrize(
    ("operation", "code"), [("write", errno.ENOSPC), ("write", errno.EIO), ("read", errno.EIO)]
)
def test_a_transfer_of_activations_that_fails_is_told_and_the_step_is_taken_anew(
    tmp_path: Path, operation: str, code: int, wanted: dict[str, torch.Tensor]
) -> None:
    with made(tmp_path) as (model, optimizer):
        step(model, optimizer, 0)
        engine_of_activations(optimizer).inject_fault(operation, after=3, times=1, error=code)
        with pytest.raises(TransferError, match=str(tmp_path)):
            passes(model, 1)
        goes_on((model, optimizer), wanted)


@pytest.mark.parametrize("where", ["before", "beside"])
def test_an_exception_in_the_middle_leaves_the_step_to_be_taken_anew(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, torch.Tensor]
) -> None:
    calls = iter(range(20))

    def raises() -> None:
        if next(calls) == 9:  # the second micro-batch of the third unit
            raise InterruptedError(where)

    with made(tmp_path) as (model, optimizer):
        step(model, optimizer, 0)
        with monkeypatch.context() as patch:
            patch.setattr(Block, where, staticmethod(raises))
            with pytest.raises(InterruptedError, match=where):
                passes(model, 1)
        goes_on((model, optimizer), wanted)


def test_beside_backward_a_step_that_has_begun_is_given_up_by_name(tmp_path: Path) -> None:
    with made(tmp_path, PLAN.but(overlap="backward")) as (model, optimizer):
        step(model, optimizer, 0)
        engine_of_activations(optimizer).inject_fault("read", after=40, times=1, error=errno.EIO)
        with pytest.raises(TransferError):
            passes(model, 1)
        with pytest.raises((OptionError, PoisonedError), match=r"resume\(\)"):
            optimizer.step()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_weights_that_a_disk_failed_for_are_not_gone_on_with(
    tmp_path: Path, operation: str
) -> None:
    with made(tmp_path, PLAN.but(overlap="backward")) as (model, optimizer):
        step(model, optimizer, 0)
        (pool,) = part_of(optimizer, ParameterPart).pools
        pool.synchronize()
        pool._files._files[0].engine.inject_fault(operation, after=1, times=1, error=errno.EIO)
        with pytest.raises((TransferError, PoisonedError)):
            _steps(model, optimizer)
        with pytest.raises((OptionError, PoisonedError), match=r"resume\(\)"):
            passes(model, 2)


def _steps(model: nn.Module, optimizer: StowedAdam) -> None:
    """Take two: a write may fail that is waited for in the second."""
    for seed in (1, 2):
        step(model, optimizer, seed)


KILLED = """
import os, signal, sys
from pathlib import Path
import test_vertical_faults as faults

for where in ("before", "beside"):
    if os.fork() == 0:  # torch has computed nothing yet: its threads are the child's own
        with faults.made(Path(sys.argv[1], where)) as made:
            faults.step(*made, 0)
            calls = iter(range(20))
            def kill():
                if next(calls) == 9:
                    os.kill(os.getpid(), signal.SIGKILL)
            setattr(faults.Block, where, staticmethod(kill))
            faults.passes(made[0], 1)
        os._exit(1)
for _ in range(2):
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
"""


def test_a_kill_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    for where in ("before", "beside"):
        (tmp_path / where).mkdir()
    children.run("-c", KILLED, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]
