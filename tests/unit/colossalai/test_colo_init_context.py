import pytest
import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.lazy import LazyInitContext
from tensorstow.colossalai.utils.model.colo_init_context import ColoInitContext


def test_parameters_are_made_as_outside() -> None:
    torch.manual_seed(0)
    outside = nn.Linear(4, 4)
    for context in (ColoInitContext(device="cpu"), LazyInitContext(), LazyInitContext(None, "cpu")):
        torch.manual_seed(0)
        with context:
            inside = nn.Linear(4, 4)
        assert torch.equal(inside.weight, outside.weight)
        assert type(inside.weight) is nn.Parameter


def test_device_and_dtype_are_honoured_inside_alone() -> None:
    with ColoInitContext(device=torch.device("meta"), dtype=torch.bfloat16):
        inside = nn.Linear(4, 4)
    assert (inside.weight.device.type, inside.weight.dtype) == ("meta", torch.bfloat16)
    with LazyInitContext(default_device="meta"):
        assert nn.Linear(4, 4).weight.is_meta
    outside = nn.Linear(4, 4)
    assert (outside.weight.device.type, outside.weight.dtype) == ("cpu", torch.float32)


def test_what_cuts_parameters_early_is_refused() -> None:
    with pytest.raises(OptionError, match=r"Booster\.boost shards them"):
        ColoInitContext(default_pg=object())
    with pytest.raises(OptionError, match="no tensor is deferred"):
        LazyInitContext(torch.Tensor)


def test_there_is_nothing_to_materialize() -> None:
    module = nn.Linear(2, 2)
    assert LazyInitContext.materialize(module) is module
