"""State dicts between torch's Adam and ours: flags of an implementation, foreign keys, age."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parity.piecewise import same_value
from tensorstow import Adam, AdamW, StowedOptimizer
from tensorstow.base.errors import OptionError
from tensorstow.colossalai import CPUAdam, HybridAdam
from tensorstow.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from tensorstow.deepspeed.states import drop_unused_masters, states_of

Make = Callable[..., torch.optim.Optimizer]


def stowed_adamw(params: Any, **options: Any) -> StowedOptimizer:  # noqa: ANN401
    return StowedOptimizer(torch.optim.AdamW, params, states="ram", **options)


OURS: list[Make] = [AdamW, HybridAdam, CPUAdam, DeepSpeedCPUAdam, FusedAdam, stowed_adamw]
FLAGS: list[dict[str, Any]] = [
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"fused": False},
    {"capturable": True},
    {"differentiable": True},
]
ours = pytest.mark.parametrize("make", OURS, ids=lambda m: m.__name__)


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))]


def step(optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def same(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def close(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    """Torch's kernels fuse a multiplication and an addition where ours do not."""
    return all(torch.allclose(p, q, rtol=1e-6, atol=1e-7) for p, q in zip(a, b, strict=True))


def saved_by_torch(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> dict[str, Any]:
    theirs = kind(weights(), lr=0.1, weight_decay=0.1)  # type: ignore[call-arg]
    step(theirs)
    return theirs.state_dict()


@ours
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_how_the_saving_process_stepped_is_not_loaded(make: Make, flags: dict[str, Any]) -> None:
    """They choose among torch's implementations of one rule."""
    saved, plain = saved_by_torch(), saved_by_torch()
    saved["param_groups"][0].update(flags)
    before = copy.deepcopy(saved)
    mine, others, twins = weights(), weights(), weights()
    loaded, reference, twin = make(mine), torch.optim.AdamW(others), make(twins)
    own = {name: loaded.param_groups[0].get(name) for name in flags}
    loaded.load_state_dict(saved)
    assert {name: loaded.param_groups[0].get(name) for name in flags} == own
    assert all(same_value(saved["param_groups"][0][k], before["param_groups"][0][k]) for k in flags)
    reference.load_state_dict(copy.deepcopy(plain))
    twin.load_state_dict(plain)
    for optimizer in (loaded, reference, twin):
        step(optimizer, 1)
    assert same(mine, twins)
    assert close(mine, others)
    reference.load_state_dict(copy.deepcopy(loaded.state_dict()))  # and back
    for optimizer in (loaded, reference):
        step(optimizer, 2)
    assert close(mine, others)


@pytest.mark.parametrize("make", [AdamW, Adam, stowed_adamw])
def test_flags_that_are_off_ask_for_nothing(make: Make) -> None:
    step(make(weights(), foreach=False, fused=False, capturable=False, differentiable=False))


@ours
def test_groups_of_an_older_torch_and_under_a_scheduler(make: Make) -> None:
    """Before 2.7 no group had decoupled_weight_decay, before 1.12 steps were Python's numbers."""
    saved = saved_by_torch()
    group = saved["param_groups"][0]
    for key in ("decoupled_weight_decay", "maximize", "foreach", "fused", "capturable"):
        del group[key]
    group["initial_lr"] = 0.4
    for entry in saved["state"].values():
        entry["step"] = int(entry["step"])
    mine, others = weights(), weights()
    loaded, reference = make(mine), torch.optim.AdamW(others, foreach=False)
    for optimizer in (loaded, reference):
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert optimizer.param_groups[0]["initial_lr"] == 0.4
        torch.optim.lr_scheduler.StepLR(optimizer, 1, last_epoch=3)
        step(optimizer, 1)
    assert close(mine, others)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("ours_is", [Adam, AdamW])
def test_which_decay_is_loaded_is_torchs(
    kind: type[torch.optim.Optimizer], ours_is: type[Adam] | type[AdamW]
) -> None:
    torchs: Any = {Adam: torch.optim.Adam, AdamW: torch.optim.AdamW}[ours_is]
    mine, others = weights(), weights()
    for optimizer in (ours_is(mine), torchs(others, foreach=False)):
        optimizer.load_state_dict(saved_by_torch(kind))
        step(optimizer, 1)
    assert close(mine, others)


@ours
@pytest.mark.parametrize("key", ["my_counter", 7, ("a", 1)], ids=str)
@pytest.mark.parametrize("value", [1, {"mean": torch.ones(2)}, [torch.zeros(3)]], ids=repr)
def test_states_under_keys_of_ones_own_are_kept(make: Make, key: Any, value: Any) -> None:  # noqa: ANN401
    mine, others, later = weights(), weights(), weights()
    first, theirs, second = make(mine), torch.optim.AdamW(others), make(later)
    for optimizer in (first, theirs):
        step(optimizer)
        optimizer.state[key] = value
        saved = optimizer.state_dict()
        assert same_value(saved["state"][key], value)
        assert list(saved["state"]) == [0, 1, key]
    second.load_state_dict(first.state_dict())
    step(second, 1)
    assert same_value(second.state_dict()["state"][key], value)
    theirs.load_state_dict(second.state_dict())
    assert same_value(theirs.state[key], value)


def test_a_key_that_is_a_parameters_number(tmp_path: Any) -> None:  # noqa: ANN401
    """Which torch takes for the parameter's own."""
    large = nn.Parameter(torch.ones(40_000))
    large.grad = torch.ones(40_000)
    for optimizer in (
        AdamW([large], states="disk", dir=tmp_path, durability="none"),
        StowedOptimizer(torch.optim.AdamW, [large], states="disk", dir=tmp_path),
    ):
        optimizer.step()
        optimizer.state[0] = "mine"  # type: ignore[index, assignment]
        assert optimizer.state_dict()["state"] == {0: "mine"}
        optimizer.close()


def test_a_checkpoint_by_names_has_no_place_for_them() -> None:
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    step(optimizer)
    optimizer.state["my_counter"] = 1  # type: ignore[index, assignment]
    with pytest.raises(OptionError, match=r"'my_counter', which is not a parameter.*client_state"):
        states_of(model, optimizer)
    drop_unused_masters(optimizer)
    del optimizer.state["my_counter"]  # type: ignore[arg-type]
    assert states_of(model, optimizer).keys() == {"weight", "bias"}


def test_a_commit_warns_of_foreign_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parameter = torch.ones(4, requires_grad=True)
    optimizer = AdamW([parameter], lr=1e-2, states="disk", dir=tmp_path / "run")
    parameter.grad = torch.ones(4)
    optimizer.step()
    optimizer.commit()
    assert "no parameters" not in caplog.text
    optimizer.state["ema"] = {"count": 1}  # type: ignore[index]
    for _ in range(2):
        optimizer.step()
        optimizer.commit()
    assert caplog.text.count("Commits do not keep 'ema' of optimizer.state") == 1
    optimizer.close()
