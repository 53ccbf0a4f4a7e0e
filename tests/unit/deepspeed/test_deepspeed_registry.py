"""From a parameter to what has it, for as long as its engine lives."""

import gc

import pytest
from torch import nn

import tensorstow
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.registry import RegisteredModel, holders_of, optimizer_of, register


def test_a_parameter_leads_to_its_optimizer_and_modules() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    optimizer = tensorstow.AdamW(model.parameters())
    kept = register(RegisteredModel(model, optimizer))
    assert optimizer_of(model[0].weight) is optimizer
    places = list(holders_of(model[0].weight))
    assert places == [(model[0], "weight"), (model[1], "weight")]
    del kept
    gc.collect()
    assert not list(holders_of(model[0].weight))
    with pytest.raises(OptionError, match=r"shape \(2, 2\)"):
        optimizer_of(model[0].weight)
    optimizer.close()
