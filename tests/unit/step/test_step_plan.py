"""Step counts, seeds of masters, and names; the steps themselves are in test_stowed_adam."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parity.beside import blocks, same, weights
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.update_on import Overlap
from tensorstow.checkpoint import content
from tensorstow.optim import step_runner
from tensorstow.step.managed_param import ParamUpdate, StepPlan
from tensorstow.step.schedule import record_step
from tensorstow.step.step_plan import must_seed, name_of, step_of


def weight(numel: int = 4, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(numel, dtype=dtype))


def test_accounting_counts_and_tells_autograd() -> None:
    p = weight()
    optimizer = AdamW([p])
    params = optimizer._params()
    param = params.get(p)
    count = step_of(param, optimizer.state[p], params.store)
    before = p._version
    update = ParamUpdate(optimizer.param_groups[0], param, None)
    record_step(StepPlan([update], [count], []), optimizer.state)
    assert optimizer.state[p]["step"] == 1
    assert p._version > before
    assert params.get(p).begun
    assert not params.get(p).written_by_others
    record_step(StepPlan([], [], []), optimizer.state)


def test_seeds_are_taken_where_others_wrote_other_bits(tmp_path: Path) -> None:
    p = weight(4, torch.bfloat16)
    optimizer = AdamW(
        [p], states="disk", dir=tmp_path, durability="none",
        policy=PipelinePolicy(chunk_elements=1024),
    )  # fmt: skip
    params = optimizer._params()
    param = params.get(p)
    assert must_seed(param, params.store)
    p.grad = torch.ones(4, dtype=torch.bfloat16)
    optimizer.step()
    assert not must_seed(param, params.store)
    with torch.no_grad():
        p.copy_(p.clone())  # the same bits
    assert param.written_by_others
    assert not must_seed(param, params.store)
    with torch.no_grad():
        p.add_(1)
    assert must_seed(param, params.store)
    optimizer.close()


def test_names_of_parameters() -> None:
    p, q = weight(), weight()
    groups = [{"params": [p]}, {"params": [q], "param_names": ["head"]}]
    assert name_of(groups, groups[0], 0) == "Parameter 0 of group 0"
    assert name_of(groups, groups[1], 0) == "Parameter 'head'"


# --- weights that others write, in a run that is committed and resumed ---


def written_by_hand(optimizer: AdamW, model: nn.Module, steps: range) -> None:
    """Train, and write weights between steps, as pruning and clamping do."""
    for step in steps:
        optimizer.zero_grad()
        torch.autograd.backward(half_loss(model, step))
        optimizer.step()
        if step in {1, 3}:
            optimizer.wait()
            with torch.no_grad():
                model.get_parameter("1.weight").mul_(1.5)
                model.get_parameter("2.bias").add_(0.25)


def half_loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def resumed_twice(directory: Path, overlap: Overlap, state_format: str | None) -> dict[str, Any]:
    """Commit right after a write by hand, and resume in a model of other weights."""
    for steps in (range(2), range(2, 6)):
        model = blocks().bfloat16()
        nn.init.zeros_(model[1].weight)
        model = model if steps.start else blocks().bfloat16()
        optimizer = AdamW(
            model.parameters(), lr=1e-2, states="disk", dir=directory, overlap=overlap,
            module=model, state_format=state_format, commit_every=None,
            policy=PipelinePolicy(chunk_elements=1024),
        )  # fmt: skip
        assert optimizer.resume() == (steps.start or None)
        written_by_hand(optimizer, model, steps)
        optimizer.commit()
        out = {**weights(model), **masters(optimizer)}
        optimizer.close()
    return out


def masters(optimizer: AdamW) -> dict[str, Any]:
    entries = optimizer.state_dict()["state"]
    return {f"master {i}": entry["master"].clone() for i, entry in entries.items()}


def undisturbed() -> dict[str, Any]:
    model = blocks().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    written_by_hand(optimizer, model, range(6))
    return {**weights(model), **masters(optimizer)}


@pytest.mark.parametrize("state_format", [None, "fp32", "split"])
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_weights_that_others_wrote_are_committed_and_seed_their_masters(
    tmp_path: Path, overlap: Overlap, state_format: str | None
) -> None:
    assert same(resumed_twice(tmp_path, overlap, state_format), undisturbed())


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_seeds_that_are_ignored_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: Overlap
) -> None:
    want = undisturbed()
    for module in (step_runner, content):
        monkeypatch.setattr(module, "must_seed", lambda *_: False)
    assert not same(resumed_twice(tmp_path, overlap, "fp32"), want)
