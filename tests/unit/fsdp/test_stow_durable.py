"""A stowed model's run goes on from its last commit, wherever its parameters live."""

from functools import partial
from pathlib import Path

import pytest
import torch

import tensorstow
from compare import all_equal
from ranks.stowed import STEPS, finish, groups_of, loss_of, model_of
from tensorstow import Plan


def _train(
    directory: Path | None, plan: Plan, dtype: torch.dtype, until: int, seed: int = 3
) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model = model_of(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed - 3)  # what resume() must overwrite
    keep = {} if directory is None else {"dir": directory, "commit_every": 1}
    make = partial(groups_of, **keep)
    model, optimizer = tensorstow.stow(model, make, plan=plan, compute_dtype=torch.float32)
    start = 0 if directory is None else optimizer.resume() or 0
    for step in range(start, until):
        loss_of(model, 0, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return finish(model, optimizer)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(states="disk"),
        Plan(parameters="disk", states="disk"),
        Plan(parameters="disk", states="disk", overlap="backward"),
    ],
    ids=["host", "disk", "disk, beside backward"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    tmp_path: Path, plan: Plan, dtype: torch.dtype
) -> None:
    want = _train(None, plan, dtype, STEPS)
    _train(tmp_path / "run", plan, dtype, STEPS - 1)
    got = _train(tmp_path / "run", plan, dtype, STEPS, seed=4)
    assert all_equal(got, want)


def test_frozen_weights_on_disk_come_back_too(tmp_path: Path) -> None:
    """A unit that nobody trains: its memory is let go of, and a commit reads it from the disk."""

    def placed() -> tuple[torch.nn.Module, tensorstow.AdamW]:
        model = model_of(torch.bfloat16)
        model.blocks[1].requires_grad_(requires_grad=False)
        make = partial(groups_of, dir=tmp_path / "run", commit_every=None)
        plan = Plan(parameters="disk", prefetch=0)
        return tensorstow.stow(model, make, plan=plan)

    model, optimizer = placed()
    frozen = model_of(torch.bfloat16).blocks[1].down.weight
    for factor in (1.0, 2.0):
        with torch.no_grad():
            model.blocks[1].down.weight.mul_(factor)
        loss_of(model, 0, 0, 0).backward()
        optimizer.step()
        optimizer.commit()
    optimizer.close()
    model, optimizer = placed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.resume()
    assert torch.equal(model.blocks[1].down.weight.full_tensor(), 2.0 * frozen)
    optimizer.close()
