"""A placeholder has shape, dtype and device, and refuses reads of values."""

import pytest
import torch

from tensorstow.base.errors import OptionError
from tensorstow.tensors.placeholder import Placeholder


def test_it_is_like_what_it_stands_for() -> None:
    placeholder = Placeholder(torch.ones(2, 3, dtype=torch.bfloat16))
    assert placeholder.shape == (2, 3)
    assert placeholder.dtype == torch.bfloat16
    assert placeholder.is_cpu
    assert type(placeholder.detach()) is Placeholder
    assert "Placeholder(shape=(2, 3)" in repr(placeholder)


@pytest.mark.parametrize("ask", [torch.sum, torch.clone, lambda t: t.add_(1), lambda t: t[0]])
def test_values_are_refused(ask: object) -> None:
    with pytest.raises(OptionError, match="was called on a placeholder"):
        ask(Placeholder(torch.ones(2)))
