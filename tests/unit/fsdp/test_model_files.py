"""Files and copies of a placed model: what is written loads whole, and else the error says how."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import tensorstow
from ranks.pool import Pool
from ranks.stowed import twins
from ranks.twin import FETCHED
from tensorstow import Budget, Plan
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.full_tensors import whole_in_place

SIZE = 6
ON_DISK = Plan(parameters="disk", states="disk")


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("write", [saved, pickle.dumps])
@pytest.mark.parametrize(
    ("part", "advice"),
    [
        (lambda model: model, r"model\.state_dict\(\).*save_safetensors.*optimizer\.state_dict"),
        (lambda model: model[1], r"model\.state_dict\(\)"),
        (lambda model: {"model": model}, r"model\.state_dict\(\)"),
        (lambda model: dict(model.named_parameters()), r"model\.state_dict\(\).*full_tensor"),
        (lambda model: [model[0].weight], r"full_tensor"),
    ],
    ids=["model", "part", "dict", "parameters", "parameter"],
)
def test_a_file_of_a_sharded_model_is_refused_with_the_call_that_writes_one(
    write: Callable[[Any], bytes], part: Callable[[nn.Module], object], advice: str
) -> None:
    model, optimizer = tensorstow.stow(made(), tensorstow.AdamW, plan=ON_DISK)
    for _ in range(2):
        with pytest.raises(OptionError, match=advice):
            write(part(model))
        assert model.float() is model  # which exchanges the attributes of parameters
    values = torch.load(io.BytesIO(saved(model.state_dict())), weights_only=True)
    assert all(torch.equal(values[name], value) for name, value in made().state_dict().items())
    with torch.no_grad():
        whole = saved({name: p.full_tensor() for name, p in model.named_parameters()})
    values = torch.load(io.BytesIO(whole), weights_only=True)
    assert all(torch.equal(values[name], value) for name, value in made().named_parameters())
    optimizer.close()


def test_a_model_that_is_only_read_is_refused() -> None:
    model, _ = tensorstow.stow(made(), None)
    with pytest.raises(OptionError, match=r"model\.state_dict\(\)"):
        saved(model)


def test_a_copy_of_a_parameter_has_memory_of_its_own() -> None:
    model, optimizer = tensorstow.stow(made(), tensorstow.AdamW, plan=ON_DISK)
    parameter = model[0].weight
    copied = copy.deepcopy(parameter)
    assert isinstance(copied, nn.Parameter)
    assert isinstance(copied, DTensor)
    kept = parameter.full_tensor().detach().clone()
    with torch.no_grad():
        copied.mul_(2)
    assert torch.equal(parameter.full_tensor(), kept)
    assert torch.equal(copied.full_tensor(), 2 * kept)
    with pytest.raises(OptionError, match="full_tensor"):
        saved(copied)
    optimizer.close()


def test_a_parameter_that_is_whole_for_a_while_is_saved_whole() -> None:
    model, optimizer = tensorstow.stow(made(), tensorstow.AdamW, plan=ON_DISK)
    with whole_in_place(model[0].weight):
        loaded = torch.load(io.BytesIO(saved(model[0].weight)), weights_only=True)
    assert torch.equal(loaded, made()[0].weight)
    with pytest.raises(OptionError, match="full_tensor"):
        saved(model[0].weight)
    optimizer.close()


@pytest.mark.parametrize(
    "options",
    [
        {"plan": Plan()},
        {"plan": "auto"},
        {"plan": "auto", "budget": Budget(host="1GiB")},
        {"plan": Plan(overlap="forward")},
        {"plan": Plan(states="disk", overlap="backward")},
        {"plan": Plan(activations="disk")},
        {"plan": Plan(stage=1, accumulation_steps=2)},
    ],
    ids=["plain", "auto", "budget", "forward", "backward", "activations", "accumulation"],
)
def test_a_whole_model_is_written_whole(options: dict[str, Any]) -> None:
    model, optimizer = tensorstow.stow(made(), tensorstow.AdamW, **options)
    same = model(torch.ones(2, SIZE))
    for loaded in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(loaded(torch.ones(2, SIZE)), same)
    optimizer.close()


def on_each_rank(plan: Plan) -> None:
    both = twins(plan)
    with pytest.raises(OptionError, match=r"save_safetensors\(model, directory\), on every rank"):
        saved(both.stowed)
    if plan.stage == 3:
        with pytest.raises(OptionError, match=r"on every rank"):
            saved(dict(both.stowed.named_parameters()))
    both.close()


@pytest.mark.parametrize("plan", [Plan(), Plan(stage=1), Plan(stage=2), FETCHED], ids=range(4))
def test_a_file_of_one_rank_is_refused(ranks: Pool, plan: Plan) -> None:
    ranks(2).run(on_each_rank, plan)
