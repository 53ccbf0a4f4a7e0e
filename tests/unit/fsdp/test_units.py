"""Units: blocks, what is shared between them, and what the root keeps."""

import pytest
from torch import nn

from models import TiedModel
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.units import aliases_of, units_of


def test_blocks_are_units_and_the_root_has_the_rest() -> None:
    units = units_of(TiedModel(5, 4))
    assert [u.name for u in units] == ["blocks.0", "blocks.1", ""]
    assert list(units[0].parameters) == ["blocks.0.weight", "blocks.0.bias"]
    assert list(units[-1].parameters) == ["embedding.weight"]


def test_a_parameter_that_blocks_share_belongs_to_the_root() -> None:
    model = TiedModel(5, 4)
    model.blocks[1].weight = model.blocks[0].weight
    units = units_of(model)
    assert [u.name for u in units] == [""]
    assert sum(len(u.parameters) for u in units) == len(list(model.parameters()))


def test_given_units_are_taken() -> None:
    model = TiedModel(5, 4)
    assert [u.name for u in units_of(model, [model.embedding])] == [""]  # it is tied to the head
    assert [u.name for u in units_of(model, [model.blocks[0]])] == ["blocks.0", ""]


def test_blocks_that_cannot_be_called_are_what_they_hold() -> None:
    def block() -> nn.ModuleDict:
        parts = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
        return nn.ModuleDict({"norm": nn.LayerNorm(2), "parts": parts})

    model = nn.Sequential(nn.ModuleList([block(), block()]))
    assert [u.name for u in units_of(model)] == [
        *(f"0.{number}.{part}" for number in (0, 1) for part in ("norm", "parts.0")),
        "",
    ]
    with pytest.raises(OptionError, match="ModuleDict is never called"):
        units_of(model, [model[0][0]])


def test_a_strange_unit_and_one_inside_another_are_refused() -> None:
    model = TiedModel(5, 4)
    with pytest.raises(OptionError, match="not inside the model"):
        units_of(model, [nn.Linear(1, 1)])
    with pytest.raises(OptionError, match="one is inside the other"):
        units_of(model, [model.blocks, model.blocks[0]])


def test_tied_parameters_have_further_names() -> None:
    assert aliases_of(TiedModel(5, 4)) == {"embedding.weight": ["head.weight"]}
