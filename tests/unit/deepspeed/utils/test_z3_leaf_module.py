"""Leaves that are set and asked for."""

import pytest
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)


@pytest.mark.parametrize("named", [nn.Linear, "Linear", "torch.nn.modules.linear.Linear"])
def test_modules_of_a_class_are_leaves_until_they_are_not(named: type[nn.Module] | str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert set_z3_leaf_modules(model, [named]) == [model[0], model[2]]
    assert get_z3_leaf_modules(model) == [model[0], model[2]]
    assert z3_leaf_module(model[0])
    assert not z3_leaf_module(model[1])
    assert unset_z3_leaf_modules(model, [named]) == [model[0], model[2]]
    assert get_z3_leaf_modules(model) == []


def test_a_class_that_the_model_has_not_is_told() -> None:
    model = nn.Sequential(nn.ReLU())
    with pytest.raises(OptionError, match="no module of these classes"):
        set_z3_leaf_modules(model, [nn.Linear])
    assert set_z3_leaf_modules(model, [nn.Linear], raise_if_not_found=False) == []


def test_leaves_are_named_too() -> None:
    model = nn.ModuleDict({"first": nn.Sequential(nn.ReLU()), "second": nn.Sequential(nn.ReLU())})
    first, second = model["first"], model["second"]
    assert set_z3_leaf_modules_by_name(model, ["first"]) == ([first], [])
    ends = ["d.0", ".0", "no"]
    found, missing = set_z3_leaf_modules_by_suffix(model, ends, raise_if_not_found=False)
    assert (found, missing) == ([second[0], first[0]], ["no"])
    assert get_z3_leaf_modules(model) == [first, first[0], second[0]]
    assert set_z3_leaf_modules_by_name(model, ["first"], flag=False) == ([first], [])
    assert get_z3_leaf_modules(model) == [first[0], second[0]]
    with pytest.raises(OptionError, match=r"\['third'\] were to be leaves"):
        set_z3_leaf_modules_by_name(model, ["first", "third"])
    assert not z3_leaf_module(first)
