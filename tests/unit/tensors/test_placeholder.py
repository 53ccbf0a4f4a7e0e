"""A stand-in has shape, dtype and device, and refuses whoever asks for values."""

import pytest
import torch

from tensorstow.base.errors import OptionError
from tensorstow.tensors.placeholder import StandIn


def test_it_is_like_what_it_stands_for() -> None:
    stand_in = StandIn(torch.ones(2, 3, dtype=torch.bfloat16))
    assert stand_in.shape == (2, 3)
    assert stand_in.dtype == torch.bfloat16
    assert stand_in.is_cpu
    assert type(stand_in.detach()) is StandIn
    assert "StandIn(shape=(2, 3)" in repr(stand_in)


@pytest.mark.parametrize("ask", [torch.sum, torch.clone, lambda t: t.add_(1), lambda t: t[0]])
def test_values_are_refused(ask: object) -> None:
    with pytest.raises(OptionError, match="stands for another"):
        ask(StandIn(torch.ones(2)))
