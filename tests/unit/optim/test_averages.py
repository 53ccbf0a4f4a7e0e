"""Averages of weights, kept by the update: the bits of torch's AveragedModel."""

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tensorstow
from tensorstow import Adam, AdamW, PipelinePolicy, _native
from tensorstow.base.errors import OptionError
from tensorstow.colossalai import HybridAdam
from tensorstow.colossalai.adam import ParamsInHostMemory
from tensorstow.formats.reference import AdamState, adam_reference, adam_scalars
from tensorstow.fsdp.units import Unit
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.planner.placement import Conditions, states_of
from tensorstow.planner.sizes import Sizes

STEPS = 5
DECAYS = (0.9999, 0.7, 0.5, 0.3, 0.0, 1.0)
SMALL = PipelinePolicy(chunk_elements=1024)
FUSES = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
"""Whether torch.lerp rounds once, as it does on every CPU with FMA."""


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 41), nn.Linear(41, 103, bias=False), nn.Linear(103, 3))
    return model.to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    """Take the step of a number: its input depends on nothing else."""
    generator = torch.Generator().manual_seed(first)
    dtype = next(model.parameters()).dtype
    optimizer.zero_grad()
    model(torch.randn(5, 37, generator=generator).to(dtype)).square().sum().backward()
    optimizer.step()


def placed(states: str | float, directory: Path) -> dict[str, Any]:
    where = {"dir": directory, "durability": "none", "policy": SMALL}
    return {"states": states, **({} if states == "host" else where)}


def averages(optimizer: StowedAdam) -> list[torch.Tensor]:
    return [entry["ema"].clone() for entry in optimizer.state_dict()["state"].values()]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.view(torch.int32), b.detach().view(torch.int32))


@pytest.mark.skipif(not FUSES, reason="torch.lerp rounds twice on this CPU")
@pytest.mark.parametrize("states", ["host", "disk", 0.5])
@pytest.mark.parametrize("decay", DECAYS)
def test_has_the_bits_of_averaged_model(decay: float, states: str | float, tmp_path: Path) -> None:
    model = make_model()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    with AdamW(model.parameters(), lr=1e-2, ema=decay, **placed(states, tmp_path)) as optimizer:
        for step in range(STEPS):
            train(model, optimizer, step)
            theirs.update_parameters(model)
        assert_same(averages(optimizer), list(theirs.module.parameters()))


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_is_within_a_rounding_a_step_of_the_exact_average(isa: str) -> None:
    """So is torch.lerp on any CPU: the two differ by no more than twice that."""
    model = make_model()
    policy = PipelinePolicy(isa=isa)  # type: ignore[arg-type]  # one of this machine
    exact: list[torch.Tensor] = []
    with Adam(model.parameters(), lr=1e-2, ema=0.9, policy=policy) as optimizer:
        for step in range(STEPS):
            train(model, optimizer, step)
            weights = [p.detach().double() for p in model.parameters()]
            weight = torch.tensor(1.0 - 0.9).double()
            exact = exact or weights
            exact = [a + (w - a) * weight for a, w in zip(exact, weights, strict=True)]
        for ours, wanted in zip(averages(optimizer), exact, strict=True):
            places = torch.finfo(torch.float32).eps * wanted.abs().max()
            assert (ours - wanted).abs().max() <= STEPS * places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("states", ["host", "disk"])
def test_of_16_bit_weights_it_is_the_masters(
    dtype: torch.dtype, states: str | float, tmp_path: Path
) -> None:
    model = make_model(dtype)
    with AdamW(model.parameters(), lr=1e-2, ema=0.7, **placed(states, tmp_path)) as optimizer:
        for step in range(STEPS):
            train(model, optimizer, step)
            masters = [e["master"].clone() for e in optimizer.state_dict()["state"].values()]
            if step == 0:
                wanted = masters
            else:
                wanted = [
                    averaged_by_reference(a, m, 0.7) for a, m in zip(wanted, masters, strict=True)
                ]
        assert_same(averages(optimizer), wanted)


def averaged_by_reference(
    average: torch.Tensor, weight: torch.Tensor, decay: float
) -> torch.Tensor:
    """Return the new average after a step that does not move the weight."""
    zeros = torch.zeros_like(weight)
    state = AdamState(zeros.clone(), zeros.clone(), ema=average.clone())
    still = adam_scalars(
        lr=0.0,
        betas=(0.9, 0.99),
        eps=1.0,
        weight_decay=0.0,
        step=1,
        decoupled=True,
        ema_weight=1.0 - decay,
    )
    adam_reference(weight.clone(), zeros, state, still)
    assert state.ema is not None
    return state.ema


@pytest.mark.skipif(not FUSES, reason="torch.lerp rounds twice on this CPU")
def test_a_group_s_decay_is_that_of_the_step() -> None:
    """A warm-up, which repeated steps must see, and another decay in another group."""
    model = make_model()
    first, second, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": [second], "ema": 0.6}, {"params": rest, "ema": None}]
    wanted: list[torch.Tensor] = []
    with AdamW(groups, lr=1e-2, ema=0.5) as optimizer:
        for step in range(STEPS):
            decay = min(0.9, (1 + step) / (10 + step))
            optimizer.param_groups[0]["ema"] = decay
            train(model, optimizer, step)
            weights = [p.detach().clone() for p in (first, second)]
            if wanted:
                for a, w, d in zip(wanted, weights, (decay, 0.6), strict=True):
                    a.lerp_(w, 1 - d)
            wanted = wanted or weights
        states = optimizer.state_dict()["state"]
        assert_same([states[0]["ema"], states[1]["ema"]], wanted)
        assert all("ema" not in states[number] for number in (2, 3))


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan"), True])
def test_a_decay_is_between_0_and_1(decay: float) -> None:
    with pytest.raises(OptionError, match="ema="):
        AdamW(make_model().parameters(), ema=decay)


def test_a_decay_is_checked_in_each_step() -> None:
    model = make_model()
    with AdamW(model.parameters(), ema=0.9) as optimizer:
        train(model, optimizer)
        train(model, optimizer)
        optimizer.param_groups[0]["ema"] = 1.5
        with pytest.raises(OptionError, match=r"ema=1\.5 was given"):
            train(model, optimizer)


@pytest.mark.parametrize("state_format", ["split", "bf16", "int8"])
def test_formats_without_whole_masters_are_refused(state_format: str) -> None:
    with pytest.raises(OptionError, match="ema was requested with states in"):
        AdamW(make_model(torch.bfloat16).parameters(), ema=0.9, state_format=state_format)


def test_whether_there_is_one_cannot_change() -> None:
    model = make_model()
    with AdamW(model.parameters(), ema=0.9) as optimizer:
        train(model, optimizer)
        train(model, optimizer)
        optimizer.param_groups[0]["ema"] = None
        with pytest.raises(OptionError, match="ema of Parameter 0 of group 0 was a number"):
            train(model, optimizer)
    with AdamW(model.parameters()) as plain:
        train(model, plain)
        plain.param_groups[0]["ema"] = 0.9
        with pytest.raises(OptionError, match="was None"):
            train(model, plain)


def test_a_state_dict_has_it(tmp_path: Path) -> None:
    whole, model = make_model(), make_model()
    with AdamW(whole.parameters(), ema=0.7) as optimizer:
        for step in range(4):
            train(whole, optimizer, step)
        wanted = averages(optimizer)
    with AdamW(model.parameters(), ema=0.7) as optimizer:
        train(model, optimizer, 0)
        train(model, optimizer, 1)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
    file.seek(0)
    with AdamW(model.parameters(), ema=0.7, **placed("disk", tmp_path)) as optimizer:
        optimizer.load_state_dict(torch.load(file))
        train(model, optimizer, 2)
        train(model, optimizer, 3)
        assert_same(averages(optimizer), wanted)


def test_files_have_it(tmp_path: Path) -> None:
    model = make_model(torch.bfloat16)
    with AdamW(model.parameters(), ema=0.7) as optimizer:
        train(model, optimizer, 0)
        train(model, optimizer, 1)
        wanted = averages(optimizer)
        optimizer.save_safetensors(tmp_path / "states.safetensors")
    with AdamW(model.parameters(), ema=0.7, **placed("disk", tmp_path)) as optimizer:
        optimizer.load_safetensors(tmp_path / "states.safetensors")
        assert_same(averages(optimizer), wanted)


def test_states_without_it_are_refused() -> None:
    model = make_model()
    with AdamW(model.parameters()) as plain:
        train(model, plain)
        saved = copy.deepcopy(plain.state_dict())
    with AdamW(model.parameters(), ema=0.9) as optimizer:
        with pytest.raises(OptionError, match="has no 'ema'"):
            optimizer.load_state_dict(saved)
        for entry, parameter in zip(saved["state"].values(), model.parameters(), strict=True):
            entry["ema"] = parameter.detach().clone()
        optimizer.load_state_dict(saved)
        assert_same(averages(optimizer), list(model.parameters()))


def test_formats_without_whole_masters_load_none() -> None:
    model = make_model(torch.bfloat16)
    with AdamW(model.parameters(), ema=0.9) as optimizer:
        train(model, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
    with AdamW(model.parameters(), state_format="split") as optimizer:
        train(model, optimizer)
        before = optimizer.states_of(model[0].weight)
        with pytest.raises(OptionError, match="ema was requested with states in split"):
            optimizer.load_state_dict(saved)
        after = optimizer.states_of(model[0].weight)
        assert before is not None
        assert after is not None
        assert all(torch.equal(before[name], after[name]) for name in before)
        train(model, optimizer)
    with AdamW(model.parameters()) as optimizer:  # the saved groups decide, as of amsgrad
        optimizer.load_state_dict(saved)
        train(model, optimizer)
        assert len(averages(optimizer)) == len(list(model.parameters()))


def test_commits_have_it(tmp_path: Path) -> None:
    whole, model = make_model(torch.bfloat16), make_model(torch.bfloat16)
    with AdamW(whole.parameters(), ema=0.7) as optimizer:
        for step in range(4):
            train(whole, optimizer, step)
        wanted = averages(optimizer)
    options: dict[str, Any] = {"states": "disk", "dir": tmp_path, "commit_every": None}
    with AdamW(model.parameters(), ema=0.6, policy=SMALL, **options) as optimizer:
        optimizer.param_groups[0]["ema"] = 0.7
        train(model, optimizer, 0)
        train(model, optimizer, 1)
        optimizer.commit()
        optimizer.snapshot("half")
    model = make_model(torch.bfloat16)
    plain = AdamW(model.parameters(), policy=SMALL, **options)
    with plain, pytest.raises(OptionError, match=r"written by AdamW\(amsgrad=False, ema=0.7\)"):
        plain.resume()
    with AdamW(model.parameters(), ema=0.1, policy=SMALL, **options) as optimizer:
        assert optimizer.resume("half") == 2
        assert optimizer.param_groups[0]["ema"] == 0.7
        train(model, optimizer, 2)
        train(model, optimizer, 3)
        assert_same(averages(optimizer), wanted)


def test_parameters_that_torch_updates_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    # As if they were on an accelerator.
    monkeypatch.setattr(ParamsInHostMemory, "manages", lambda *_: False)
    optimizer = HybridAdam([{"params": list(model.parameters()), "ema": 0.9}])
    with optimizer, pytest.raises(OptionError, match="torch's fused Adam updates it without"):
        train(model, optimizer)


def test_a_plan_counts_it() -> None:
    model = make_model(torch.bfloat16)
    factory = partial(AdamW, ema=0.9)
    for states in ("host", "disk"):
        plan = tensorstow.Plan(states=states)  # type: ignore[arg-type]  # text is a tier
        model, optimizer = tensorstow.stow(make_model(torch.bfloat16), factory, plan=plan)
        elements = sum(p.numel() for p in model.parameters())
        memory = tensorstow.usage(optimizer=optimizer).states
        assert memory.logical_bytes == 16 * elements
        units = [Unit("", model, dict(model.named_parameters()))]
        conditions = Conditions(device_is_host=True, averages=True)
        predicted = states_of(plan, Sizes.of(units, 1), conditions)
        assert predicted.logical_bytes == memory.logical_bytes
        assert predicted.disk_bytes == memory.disk_bytes
        optimizer.close()
