"""One step on the device: what is asked of the updater, and what is left behind it."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from remote import make_remote
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import OptionError
from tensorstow.formats.reference import AdamScalars
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.step.gradient_feed import StepFeeds, StepPath
from tensorstow.step.hybrid_step_path import HybridStepPath, device_param_updates
from tensorstow.step.managed_param import StepPlan

SMALL = PipelinePolicy(chunk_elements=1024)


def made(patch: pytest.MonkeyPatch, **given: object) -> tuple[dict[str, nn.Parameter], StowedAdam]:
    make_remote(patch)
    weights = {
        "wide": nn.Parameter(torch.ones(40, 50)),
        "half": nn.Parameter(torch.ones(30).bfloat16()),
        "unused": nn.Parameter(torch.ones(7)),
    }
    groups = [
        {"params": [weights["wide"], weights["unused"]]},
        {"params": [weights["half"]], "lr": 0.5, "maximize": True},
    ]
    optimizer = AdamW(groups, lr=0.25, update_on="device", states="disk", policy=SMALL, **given)  # type: ignore[arg-type]
    return weights, optimizer


def test_the_updater_is_told_what_the_kernel_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer = made(monkeypatch)
    weights["wide"].grad = torch.arange(2000.0).view(50, 40).t()
    weights["half"].grad = torch.ones(30, dtype=torch.bfloat16)
    steps = optimizer._runtime.steps
    plan: StepPlan = steps._make_plan(steps._collect(), 0.5, commits=False)
    updates = device_param_updates(plan)
    wide, half = (optimizer._params().get(weights[n]).number for n in ("wide", "half"))
    assert updates.keys() == {wide, half}
    assert torch.equal(updates[wide].gradient, weights["wide"].grad.reshape(-1))
    assert isinstance(updates[wide].scalars, AdamScalars)
    assert (updates[wide].scalars.grad_factor, updates[half].scalars.grad_factor) == (0.5, -0.5)
    assert updates[half].scalars.step_size == pytest.approx(5.0)
    assert updates[half].seed_master  # nobody has written it yet
    assert not updates[wide].seed_master
    assert updates[half].key != updates[wide].key
    for due in plan.updates:  # their new weights come by chunk, from there or here
        row = plan.rows[due.param.number]
        assert row.gradient is None
        assert row.expected


def test_fp32_weights_stay_up_until_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, optimizer = made(monkeypatch, dir=tmp_path, commit_every=None)
    params = optimizer._params()
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    stale = {n: params.get(w).host_weight.is_stale for n, w in weights.items()}  # type: ignore[union-attr]
    assert stale == {"wide": True, "half": False, "unused": True}
    number = params.get(weights["wide"]).number
    assert torch.equal(params.weight(number), weights["wide"])
    optimizer.step()
    optimizer.commit()
    assert not any(params.get(w).host_weight.is_stale for w in weights.values())  # type: ignore[union-attr]
    optimizer.close()


def test_whoever_frees_the_model_of_gradients_steps_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, optimizer = made(monkeypatch)
    before = {n: w.detach().clone() for n, w in weights.items()}
    optimizer.step()  # nobody has a gradient
    assert all(torch.equal(w, before[n]) for n, w in weights.items())
    weights["wide"].grad = torch.ones(40, 50)
    optimizer.step()
    changed = {n: not torch.equal(w, before[n]) for n, w in weights.items()}
    assert changed == {"wide": True, "half": False, "unused": False}
    assert optimizer.state[weights["wide"]]["step"] == 1


def test_a_model_that_leaves_the_device_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, optimizer = made(monkeypatch)
    weights["wide"].grad = torch.ones(40, 50)
    monkeypatch.undo()
    with pytest.raises(OptionError, match=r"Parameter 0 of group 0 .*Move the model first"):
        optimizer.step()


@pytest.mark.parametrize("kind", [StepFeeds, HybridStepPath])
def test_both_paths_of_a_step_have_its_interface_whole(kind: type) -> None:
    declared = {name: value for name, value in vars(StepPath).items() if name[0] != "_"}
    assert {"begin", "offer", "close", "wait", "device_share"} <= declared.keys()
    for name, value in declared.items():
        assert name in vars(kind), name
        if inspect.isfunction(value):
            assert list(inspect.signature(vars(kind)[name]).parameters) == list(
                inspect.signature(value).parameters
            )
