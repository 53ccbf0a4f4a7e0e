"""One step's rows and scalars; the steps themselves are in test_stowed_adam and test_parity."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parity.beside import blocks, same, weights
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.update_on import Overlap
from tensorstow.checkpoint import commits
from tensorstow.step import step_plan
from tensorstow.step.managed_param import ParamUpdate
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import as_step, collect, make_plan, must_seed, name_of, record_step


def all_of(_: torch.Tensor) -> bool:
    return True


def optimizer_with(*parameters: nn.Parameter) -> tuple[AdamW, ParamTable]:
    optimizer = AdamW([{"params": [p]} for p in parameters])
    return optimizer, optimizer._params()


def weight(numel: int = 4, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(numel, dtype=dtype))


def test_only_parameters_with_a_gradient_are_due() -> None:
    used, unused, frozen = weight(), weight(), weight()
    frozen.requires_grad = False
    optimizer, params = optimizer_with(used, unused, frozen)
    used.grad, frozen.grad = torch.ones(4), torch.ones(4)
    update, new_params = collect(optimizer.param_groups, params, all_of)
    assert [p for _, p, _ in update] == [used, frozen]
    assert new_params == [frozen]  # frozen when the optimizer was made: it has no states yet


def test_gradients_are_contiguous_then() -> None:
    p = nn.Parameter(torch.ones(3, 4))
    optimizer, params = optimizer_with(p)
    p.grad = torch.arange(12.0).view(4, 3).t()
    [(_, _, gradient)], _ = collect(optimizer.param_groups, params, all_of)
    assert gradient.is_contiguous()
    assert torch.equal(gradient, p.grad)


def test_what_cannot_be_used_is_named_before_anything_changes() -> None:
    good, bad = weight(), weight()
    optimizer, params = optimizer_with(good, bad)
    good.grad = torch.ones(4)
    bad.grad = torch.ones(4).to_sparse()
    with pytest.raises(DTypeError, match="Parameter 0 of group 1 is sparse"):
        collect(optimizer.param_groups, params, all_of)
    bad.grad = None
    optimizer.param_groups[1]["amsgrad"] = True
    bad.grad = torch.ones(4)
    with pytest.raises(OptionError, match="amsgrad of Parameter 0 of group 1"):
        collect(optimizer.param_groups, params, all_of)
    assert not optimizer.state[good]


def test_scalars_are_shared_by_group_and_count() -> None:
    parameters = [weight() for _ in range(4)]
    optimizer = AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])
    params = optimizer._params()
    optimizer.state[parameters[1]]["step"] = as_step(7)
    updates = [
        ParamUpdate(group, params.get(p), torch.ones(4)) for group in optimizer.param_groups
        for p in group["params"]
    ]  # fmt: skip
    plan = make_plan(updates, params, optimizer.state, factor=0.5)
    assert [row.scalars for row in plan.rows] == [0, 1, 0, 2]
    assert plan.scalars.shape == (3, 9)
    assert [count.item() for count in plan.counts] == [0, 7, 0, 0]
    assert len({row.key for row in plan.rows}) == 4
    assert not plan.commits


def test_keys_differ_by_step() -> None:
    p = weight()
    optimizer, params = optimizer_with(p)
    updates = [ParamUpdate(optimizer.param_groups[0], params.get(p), torch.ones(4))]
    keys = []
    for step in range(50):
        optimizer.state[p]["step"] = as_step(step)
        keys.append(make_plan(updates, params, optimizer.state, factor=1.0).rows[0].key)
    assert len(set(keys)) == 50
    assert all(0 <= key < 1 << 63 for key in keys)


def test_a_gradient_that_is_still_to_come_is_expected() -> None:
    p, q = weight(), weight()
    optimizer, params = optimizer_with(p, q)
    plan = make_plan(
        [ParamUpdate(optimizer.param_groups[0], params.get(p), None)], params, optimizer.state,
        factor=1.0,
    )  # fmt: skip
    assert plan.rows[0].expected
    assert plan.rows[0].gradient is None
    assert not plan.rows[1].expected
    assert plan.rows[1].weight is q  # a commit takes it too
    assert not optimizer.state[p]  # no gradient yet: no step count


def test_accounting_counts_and_tells_autograd() -> None:
    p = weight()
    optimizer, params = optimizer_with(p)
    updates = [ParamUpdate(optimizer.param_groups[0], params.get(p), torch.ones(4))]
    plan = make_plan(updates, params, optimizer.state, factor=1.0)
    before = p._version
    record_step(plan, optimizer.state)
    assert optimizer.state[p]["step"] == 1
    assert p._version > before
    assert params.get(p).begun
    assert not params.get(p).written_by_others
    record_step(step_plan.StepPlan([], [], [], plan.scalars), optimizer.state)


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
    for module in (step_plan, commits):
        monkeypatch.setattr(module, "must_seed", lambda *_: False)
    assert not same(resumed_twice(tmp_path, overlap, "fp32"), want)
