"""Classes that keep something over all parameters are found out before they go wrong."""

from typing import Any

import pytest
import torch
from torch import nn, optim

from tensorstow.base.errors import OptionError
from tensorstow.optim.piecewise.trial import ELEMENTWISE, WHOLE, refuse_class, try_out

KNOWN = sorted([*ELEMENTWISE, *WHOLE], key=lambda c: c.__name__)


def groups() -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(100, 200)), nn.Parameter(torch.ones(30, 3))]}]


@pytest.mark.parametrize("optimizer_class", KNOWN, ids=lambda c: c.__name__)
def test_the_known_ones_pass(optimizer_class: type[optim.Optimizer]) -> None:
    try_out(optimizer_class, groups(), {}, elementwise=optimizer_class in ELEMENTWISE)


@pytest.mark.parametrize("optimizer_class", [optim.Adafactor, optim.Muon])
def test_whole_ones_are_not_elementwise(optimizer_class: type[optim.Optimizer]) -> None:
    with pytest.raises(OptionError, match=optimizer_class.__name__):
        try_out(optimizer_class, groups(), {}, elementwise=True)


class CountsItself(optim.SGD):
    count = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step(closure)


class CountsInItsGroup(optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)


class Noisy(optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p))
        super().step(closure)


class ClipsAll(optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.1)
        super().step(closure)


class NeedsAClosure(optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override] # noqa: ANN401
        super().step(closure)


class KeepsCopies(optim.SGD):
    def __init__(self, params: Any) -> None:  # noqa: ANN401
        super().__init__(params)
        self.slow = [p.clone() for group in self.param_groups for p in group["params"]]


@pytest.mark.parametrize(
    ("optimizer_class", "words"),
    [
        (CountsItself, "self.count"),
        (CountsInItsGroup, "count"),
        (Noisy, "random numbers"),
        (ClipsAll, "one after the other"),
        (NeedsAClosure, "closure"),
        (KeepsCopies, "self.slow"),
    ],
)
def test_what_is_kept_over_all_parameters_is_named(
    optimizer_class: type[optim.Optimizer], words: str
) -> None:
    before = torch.get_rng_state()
    with pytest.raises(OptionError, match=words):
        try_out(optimizer_class, groups(), {}, elementwise=False)
    assert torch.equal(before, torch.get_rng_state())


def test_a_parameter_that_is_alone_gets_a_twin() -> None:
    alone = [{"params": [nn.Parameter(torch.ones(5))]}]
    with pytest.raises(OptionError, match="one after the other"):
        try_out(ClipsAll, alone, {}, elementwise=False)


def test_instances_and_other_things_are_no_classes() -> None:
    for thing in (nn.Linear, optim.SGD([nn.Parameter(torch.ones(1))]), None):
        with pytest.raises(OptionError, match="class"):
            refuse_class(thing)
