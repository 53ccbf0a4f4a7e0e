"""Adapters: as many parameters, and modules of the same names, as peft has."""

from typing import Any

import pytest
import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.units import units_of
from tensorstow.measure.activations import trace
from tensorstow.measure.adapters import with_adapters
from tensorstow.measure.models import build_model
from tensorstow.planner.sizes import Sizes

peft: Any = pytest.importorskip("peft")


def trained(model: nn.Module) -> dict[torch.dtype, int]:
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return counts


@pytest.mark.filterwarnings("ignore")  # peft calls what transformers deprecates
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2"])
def test_adapters_are_those_of_peft(name: str) -> None:
    mine = build_model(name, torch.bfloat16, lora=16).module
    with torch.device("meta"):
        config = peft.LoraConfig(r=16, target_modules="all-linear")
        theirs = peft.get_peft_model(build_model(name, torch.bfloat16).module, config)
    assert trained(mine) == trained(theirs)
    assert sum(p.numel() for p in mine.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert [unit.name for unit in units_of(mine)] == [unit.name for unit in units_of(theirs)]
    assert [sum(p.nbytes for p in unit.parameters.values()) for unit in units_of(mine)] == [
        sum(p.nbytes for p in unit.parameters.values()) for unit in units_of(theirs)
    ]


def test_a_model_with_adapters_computes_in_the_dtype_of_its_base() -> None:
    model = build_model("llama-3.2-1b", lora=8)
    sizes = Sizes.of(units_of(model.module), 1)
    assert {dtype for dtype, _ in sizes.trained} == {torch.float32}
    assert sizes.compute_dtype == torch.bfloat16


def test_the_sum_is_what_adapters_add() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(2, 4)
    expected = base(x)
    adapted = with_adapters(base, 2)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.zeros_(parameter)
    assert torch.equal(adapted(x), expected)
    first: Any = base[0]
    nn.init.ones_(first.lora_A.weight)
    nn.init.ones_(first.lora_B.weight)
    inner = base[1](first.base_layer(x) + 2 * x.sum(1, keepdim=True))
    assert torch.allclose(adapted(x), base[2](inner))


def test_frozen_weights_have_no_gradients_among_what_is_traced() -> None:
    full, adapted = (trace(build_model("gpt2", lora=rank), 1, 64) for rank in (None, 4))
    assert adapted.operations < 0.8 * full.operations
    assert adapted.held().peak > 0


def test_a_model_without_layers_inside_is_refused() -> None:
    with pytest.raises(OptionError, match="--lora r=4 was given, and the model has no linear"):
        with_adapters(nn.Linear(2, 2), 4)
