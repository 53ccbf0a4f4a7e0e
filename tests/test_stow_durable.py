"""A stowed model's run goes on from its last commit, wherever its parameters live."""

from functools import partial
from pathlib import Path

import pytest
import torch

import tensorstow
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
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
