"""What ``stow`` refuses before anything is placed: meshes, parameters, optimizers."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

import tensorstow
from remote import make_remote
from tensorstow import Budget, Plan, Tier
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.colossalai import CPUAdam, HybridAdam
from tensorstow.fsdp.units import units_of
from tensorstow.fsdp.validation import (
    given_keywords,
    stays_on_device,
    validate_arguments,
    validate_mesh,
    validate_parameters,
)
from tensorstow.tensors.dtensor import shard_of

CPU = torch.device("cpu")


@dataclass
class Mesh:
    """As much of a mesh as is looked at."""

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None = None
    device_type: str = "cpu"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self) -> int:
        return torch.Size(self.shape).numel()


NAMES = ("replicate", "shard")


@pytest.mark.parametrize(
    ("mesh", "plan", "said"),
    [
        (Mesh((2, 2)), Plan(), r"shape \(2, 2\) with the names None"),
        (Mesh((2, 2, 2), ("a", "b", "c")), Plan(), "one row of ranks, or"),
        (Mesh((4,), device_type="cuda"), Plan(), "mesh of 'cuda'.*computes on cpu"),
        (Mesh((4,)), Plan(stage=0), r"cuts parameters in 4.*shape \(4, 1\)"),
        (Mesh((2, 2), NAMES), Plan(stage=0), "cuts parameters in 2"),
        (Mesh((2, 2), NAMES), Plan(replicas=4), "replicas=4 was given with a mesh of 2"),
        (Mesh((4,)), Plan(replicas=2), "replicas=2 was given with a mesh of 1"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: Mesh, plan: Plan, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        validate_mesh(mesh, plan, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        (Mesh((4,)), Plan()),
        (Mesh((4,), ("ranks",)), Plan(stage=1)),
        (Mesh((2, 2), NAMES), Plan()),
        (Mesh((2, 2), NAMES), Plan(replicas=2, stage=2)),
        (Mesh((4, 1), NAMES), Plan(stage=0)),
    ],
    ids=str,
)
def test_a_mesh_that_fits_is_taken(mesh: Mesh, plan: Plan) -> None:
    validate_mesh(mesh, plan, CPU)  # type: ignore[arg-type]


def test_what_is_right_is_taken() -> None:
    for dtype in (None, torch.float32, torch.bfloat16, torch.float16):
        for plan in ("auto", Plan()):
            validate_arguments(nn.Linear(1, 1), list, plan=plan, compute_dtype=dtype)


def model_with(**parameters: nn.Parameter) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name, parameter in parameters.items():
        model[0].register_parameter(name, parameter)
    return model


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        (torch.tensor(1.0), r"0\.extra is a scalar.*shape \(1,\)"),
        (torch.empty(0, 3), r"0\.extra has no elements \(shape \(0, 3\)\)"),
        (torch.ones(2, dtype=torch.bfloat16), r"unit '0' has several dtypes.*0\.extra is"),
    ],
)
def test_what_cannot_be_sharded_is_named(parameter: torch.Tensor, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        validate_parameters(units_of(model_with(extra=nn.Parameter(parameter))))


def test_a_hook_that_would_not_be_called_is_named() -> None:
    model = model_with()
    hook = model[1].weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(OptionError, match=r"1\.weight has a hook \(register_hook\)"):
        validate_parameters(units_of(model))
    hook.remove()
    validate_parameters(units_of(model))


def test_frozen_parameters_may_have_dtypes_of_their_own() -> None:
    frozen = nn.Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False)
    validate_parameters(units_of(model_with(extra=frozen)))


def test_units_may_have_dtypes_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    validate_parameters(units_of(model))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def test_a_partial_and_a_function_are_told_where_states_live() -> None:
    def groups(named: list[tuple[str, torch.Tensor]], **placement: object) -> tensorstow.AdamW:
        return tensorstow.AdamW([{"params": named[:2]}, {"params": named[2:]}], **placement)

    for make in (partial(tensorstow.AdamW, lr=1e-2), groups):
        _, optimizer = tensorstow.stow(_model(), make, plan=Plan(states="disk"))
        assert optimizer.placement_of_states == "disk"
        optimizer.close()


def test_what_was_said_to_the_optimizer_holds_for_an_automatic_plan() -> None:
    _, optimizer = tensorstow.stow(_model(), partial(tensorstow.AdamW, states="disk"))
    assert optimizer.placement_of_states == "disk"
    optimizer.close()


Named = list[tuple[str, torch.Tensor]]


def _takes_nothing(named: Named) -> tensorstow.AdamW:
    return tensorstow.AdamW(named)


def _passes_nothing_on(named: Named, **_: object) -> tensorstow.AdamW:
    return tensorstow.AdamW(named)


def _makes_another(named: Named, **_: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_takes_nothing, r"\*\*placement"),
        (_passes_nothing_on, r"Pass \*\*placement on"),
        (_makes_another, "returned a SGD"),
        (torch.optim.AdamW, r"Use stow\(model, tensorstow\.AdamW"),
        (
            partial(torch.optim.SGD, lr=1),
            r"Use stow\(model, partial\(tensorstow\.StowedOptimizer, torch\.optim\.SGD\), lr=1\)",
        ),
        (partial(tensorstow.AdamW, states="ram"), "the plan says 'disk'"),
    ],
)
def test_callables_that_drop_the_plan_are_refused(make: object, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        tensorstow.stow(_model(), make, plan=Plan(states="disk"))


@pytest.mark.parametrize("word", ["host", "ram", "cpu", Tier.HOST])
@pytest.mark.parametrize("plan", [Plan(states="ram"), Plan(states="host"), "auto"])
def test_both_words_for_the_host_agree(plan: Plan | Literal["auto"], word: str) -> None:
    _, optimizer = tensorstow.stow(_model(), partial(tensorstow.AdamW, states=word), plan=plan)
    assert optimizer.placement_of_states == "host"
    optimizer.close()


def test_a_typo_is_an_error() -> None:
    with pytest.raises(OptionError, match="weight_decya"):
        tensorstow.stow(_model(), partial(tensorstow.AdamW, weight_decya=0.1))


def _drops_the_rest(named: Named, **placement: object) -> tensorstow.AdamW:
    return tensorstow.AdamW(named, states=placement.get("states", "ram"))


@pytest.mark.parametrize(
    ("plan", "keywords"),
    [
        (Plan(overlap="backward"), {}),
        (Plan(overlap="forward"), {}),
        (Plan(states="disk", ram_budget="64MiB"), {}),
        (Plan(update_on="host"), {}),
        (Plan(states="disk"), {"dir": "run"}),
    ],
)
def test_whatever_is_dropped_is_noticed(
    plan: Plan, keywords: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"Pass \*\*placement on"):
        tensorstow.stow(_model(), _drops_the_rest, plan=plan, **keywords)


def test_a_plan_that_updates_on_the_device_needs_one() -> None:
    plan = Plan(parameters="device", update_on="device")
    model = _model()
    before = [p.detach().clone() for p in model.parameters()]
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here: tests/gpu/test_gpu_stow.py")
    with pytest.raises(OptionError, match="no accelerator to update on"):
        tensorstow.stow(model, tensorstow.AdamW, plan=plan)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("states", ["host", "disk"])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_a_plan_that_updates_on_the_device_does(
    compute_dtype: torch.dtype | None, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU in the device's place, over whole parameters and over FSDP2's shards."""

    def trained(update_on: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        plan = Plan(parameters="device", states=states, update_on=update_on)
        model, optimizer = tensorstow.stow(
            _model(), tensorstow.AdamW, plan=plan, compute_dtype=compute_dtype
        )
        assert bool(optimizer._params().update_router.updaters) == (update_on == "device")
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return [shard_of(p).detach().clone() for p in model.parameters()]

    want = trained(None)
    make_remote(monkeypatch)
    assert all(map(torch.equal, trained("device"), want))


def test_update_on_may_be_said_to_the_optimizer_where_the_plan_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_remote(monkeypatch)
    there = partial(tensorstow.AdamW, update_on="device")
    _, optimizer = tensorstow.stow(_model(), there, plan=Plan(parameters="device"))
    assert optimizer.offload_policy.update_on == "device"
    optimizer.close()
    plan = Plan(parameters="device", update_on="host")
    with pytest.raises(OptionError, match="Say it in one place"):
        tensorstow.stow(_model(), there, plan=plan)


@pytest.mark.parametrize("given", [{"overlap": "forward"}, {"states": "disk"}, {"states": 0.5}])
def test_what_contradicts_a_plan_is_refused(given: dict[str, object]) -> None:
    said = "^{}={!r} was given to the optimizer, and .* Say it in one place"
    with pytest.raises(OptionError, match=said.format(*next(iter(given.items())))):
        tensorstow.stow(_model(), partial(tensorstow.AdamW, **given), plan=Plan(overlap="none"))


@pytest.mark.parametrize("plan", [Plan(), Plan(parameters="disk")])
@pytest.mark.parametrize("overlap", ["junk", 3])
def test_an_overlap_that_the_optimizer_does_not_have_is_refused_by_its_values(
    plan: Plan, overlap: object
) -> None:
    with pytest.raises(OptionError, match=r"overlap=.*none.*forward.*backward"):
        tensorstow.stow(_model(), tensorstow.AdamW, overlap=overlap, plan=plan)


def test_an_error_about_a_class_of_torch_names_no_overlap_that_nobody_gave() -> None:
    make = partial(tensorstow.StowedOptimizer, torch.optim.SGD, lr=0.1)
    with pytest.raises(OptionError) as caught:
        tensorstow.stow(_model(), make, plan=Plan(parameters="disk"))
    assert "parameters on disk" in str(caught.value)
    assert "overlap" not in str(caught.value)


def test_an_automatic_plan_keeps_its_budget_whatever_the_optimizer_was_told() -> None:
    with pytest.raises(BudgetError):
        tensorstow.stow(
            _model(), partial(tensorstow.AdamW, states="ram"), budget=Budget(host="200B")
        )


def test_a_factory_is_asked_of_its_own_keywords_and_parameters() -> None:
    on_disk = {"nvme_offload_fraction": 0.5}
    assert given_keywords(partial(CPUAdam, **on_disk)) == {**on_disk, "states": "disk"}
    assert given_keywords(partial(tensorstow.AdamW, lr=1.0)) == {"lr": 1.0}
    assert given_keywords(CPUAdam) == {}
    assert stays_on_device(HybridAdam)("weight")
    assert stays_on_device(partial(HybridAdam, lr=1.0))("weight")
    assert not stays_on_device(partial(CPUAdam, lr=1.0))("weight")
