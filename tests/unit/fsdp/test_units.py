"""Units: blocks, what is shared between them, and what the root keeps."""

import pytest
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.units import aliases_of, units_of


class Model(nn.Module):
    """Two blocks, an embedding, and a head that is tied to it."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_blocks_are_units_and_the_root_has_the_rest() -> None:
    units = units_of(Model())
    assert [u.name for u in units] == ["blocks.0", "blocks.1", ""]
    assert list(units[0].parameters) == ["blocks.0.weight", "blocks.0.bias"]
    assert list(units[-1].parameters) == ["embedding.weight"]
    assert units[-1].nbytes == 5 * 4 * 4


def test_a_parameter_that_blocks_share_belongs_to_the_root() -> None:
    model = Model()
    model.blocks[1].weight = model.blocks[0].weight
    units = units_of(model)
    assert [u.name for u in units] == [""]
    assert sum(len(u.parameters) for u in units) == len(list(model.parameters()))


def test_given_units_are_taken() -> None:
    model = Model()
    assert [u.name for u in units_of(model, [model.embedding])] == [""]  # it is tied to the head
    assert [u.name for u in units_of(model, [model.blocks[0]])] == ["blocks.0", ""]


def test_a_strange_unit_and_one_inside_another_are_refused() -> None:
    model = Model()
    with pytest.raises(OptionError, match="not inside the model"):
        units_of(model, [nn.Linear(1, 1)])
    with pytest.raises(OptionError, match="one is inside the other"):
        units_of(model, [model.blocks, model.blocks[0]])


def test_tied_parameters_have_further_names() -> None:
    assert aliases_of(Model()) == {"embedding.weight": ["head.weight"]}
