"""What is checked of options, parameters, gradients and saved states."""

import pytest
import torch
from torch import nn

from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.optim.generic import validation
from tensorstow.states.policy import PipelinePolicy


class Wrapped(torch.Tensor):
    pass


def test_options_that_say_nothing_pass() -> None:
    validation.refuse_keywords({"foreach": False, "fused": None, "lr": 0.1})
    assert validation.check_policy(None) == PipelinePolicy()


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (nn.Parameter(torch.empty(3, device="meta")), "to_empty"),
        (torch.ones(3).to_sparse(), "layout"),
        (torch.ones(3).as_subclass(Wrapped), "Wrapped"),
    ],
)
def test_parameters_that_cannot_be_stepped_here(parameter: torch.Tensor, words: str) -> None:
    with pytest.raises(DTypeError, match=words):
        validation.check_parameter(parameter, "it")


def test_a_gradient_of_another_shape() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    parameter.data = torch.ones(4)
    with pytest.raises(DTypeError, match="its data was replaced"):
        validation.check_gradient(parameter, None, "it")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"step": torch.tensor(1.0), "x": torch.ones(2)}, r"\(2,\)"),
        ({"step": torch.tensor(1.0)}, "no 'x'"),
    ],
)
def test_saved_states_that_do_not_fit(entry: dict[str, torch.Tensor], words: str) -> None:
    expected = {"step": torch.tensor(0.0), "x": torch.empty(3, device="meta")}
    validation.check_saved({}, expected, torch.ones(3), "it", chunked=False)
    with pytest.raises(OptionError, match=words):
        validation.check_saved(entry, expected, torch.ones(3), "it", chunked=False)


def test_chunks_need_states_as_long_as_the_parameter() -> None:
    for chunked in (False, True):
        entry = {"x": torch.ones(2), "n": 3}
        if not chunked:
            validation.check_saved(entry, {}, torch.ones(3), "it", chunked=chunked)
            continue
        with pytest.raises(OptionError, match="different models"):
            validation.check_saved(entry, {}, torch.ones(3), "it", chunked=chunked)


def test_states_take_the_dtype_and_order_that_the_class_keeps() -> None:
    expected = {"x": torch.empty(3, 2, dtype=torch.bfloat16, device="meta").t()}
    entry = {"x": torch.randn(2, 3), "y": torch.ones(1, dtype=torch.float64), "n": 3}
    cast = validation.cast_as_kept(entry, expected)
    assert cast["x"].dtype == torch.bfloat16
    assert cast["x"].stride() == (1, 2)
    assert torch.equal(cast["x"], entry["x"].to(torch.bfloat16))
    assert cast["y"].dtype == torch.float64
    assert cast["n"] == 3
