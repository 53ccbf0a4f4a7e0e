"""From a parameter to what has it, for as long as its engine lives."""

import gc

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.registry import (
    PlacedParameters,
    RegisteredModel,
    optimizer_of,
    owner_of,
    placed_of,
    register,
    registered,
)


def test_a_parameter_leads_to_its_optimizer_and_model() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[0].bias.requires_grad = False
    optimizer = tensorstow.AdamW(p for p in model.parameters() if p.requires_grad)
    kept = register(RegisteredModel(model, optimizer))
    assert optimizer_of(model[1].weight) is optimizer
    assert owner_of(model[0].bias) is kept
    assert registered()[id(kept)] is kept
    del kept
    gc.collect()
    assert owner_of(model[0].weight) is None
    assert not registered()
    with pytest.raises(OptionError, match=r"shape \(2, 2\)"):
        optimizer_of(model[0].weight)
    optimizer.close()


def test_a_parameter_of_before_leads_to_the_one_in_its_place() -> None:
    model = nn.Linear(2, 2)
    weight, bias = model.weight, model.bias
    before = PlacedParameters(model)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    before.note(model)
    assert placed_of(weight) is model.weight
    assert placed_of(bias) is bias
