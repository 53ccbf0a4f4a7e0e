"""What FSDP2 cannot shard is refused by name; what it can is not."""

import pytest
import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.shardable import check_shardable
from tensorstow.fsdp.units import units_of


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
        check_shardable(units_of(model_with(extra=nn.Parameter(parameter))))


def test_a_hook_that_would_not_be_called_is_named() -> None:
    model = model_with()
    hook = model[1].weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(OptionError, match=r"1\.weight has a hook \(register_hook\)"):
        check_shardable(units_of(model))
    hook.remove()
    check_shardable(units_of(model))


def test_frozen_parameters_may_have_dtypes_of_their_own() -> None:
    frozen = nn.Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False)
    check_shardable(units_of(model_with(extra=frozen)))


def test_units_may_have_dtypes_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    check_shardable(units_of(model))
