"""Names of parameters and tensors: each its own, or none."""

import torch
from torch import nn

from tensorstow.checkpoint.content import module_tensors, names_of, own_names


def test_names_are_the_modules_or_a_groups() -> None:
    model = nn.Linear(2, 2)
    outside = nn.Parameter(torch.ones(1))
    groups = [{"params": [model.weight], "param_names": ["w"]}, {"params": [outside]}]
    assert names_of(groups, None) == {id(model.weight): "w"}
    assert names_of(groups, model)[id(model.weight)] == "weight"
    assert own_names(groups, model) is None
    groups[1]["param_names"] = ["outside"]
    assert own_names(groups, model) == [["weight"], ["outside"]]
    groups[1]["param_names"] = ["weight"]
    assert own_names(groups, model) is None


def test_tensors_of_a_module_are_those_of_its_state_dict() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].register_buffer("scratch", torch.ones(2), persistent=False)
    model.register_buffer("seen", torch.ones(1))
    assert {name for name, _ in module_tensors(model)} == model.state_dict().keys()
