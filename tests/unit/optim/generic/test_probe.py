"""Classes that keep something over all parameters are found out before they go wrong."""

import random
from typing import Any

import pytest
import torch
from torch import nn, optim

from tensorstow import StowedOptimizer
from tensorstow.base.errors import OptionError
from tensorstow.optim.generic.known_classes import ELEMENTWISE, WHOLE, refuse_class
from tensorstow.optim.generic.probe import probe

KNOWN = sorted([*ELEMENTWISE, *WHOLE], key=lambda c: c.__name__)


def groups() -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(100, 200)), nn.Parameter(torch.ones(30, 3))]}]


@pytest.mark.parametrize("optimizer_class", KNOWN, ids=lambda c: c.__name__)
def test_the_known_ones_pass(optimizer_class: type[optim.Optimizer]) -> None:
    probe(optimizer_class, groups(), {}, elementwise=optimizer_class in ELEMENTWISE)


@pytest.mark.parametrize("optimizer_class", [optim.Adafactor, optim.Muon])
def test_whole_ones_are_not_elementwise(optimizer_class: type[optim.Optimizer]) -> None:
    with pytest.raises(OptionError, match=optimizer_class.__name__):
        probe(optimizer_class, groups(), {}, elementwise=True)


def every(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


class Tried(optim.SGD):
    """Of one's own making, with ``work`` before SGD's step."""

    def work(self) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.work()
        super().step(closure)


class Noisy(Tried):
    def work(self) -> None:
        for p in every(self):
            p.grad.add_(torch.randn_like(p))


class NoisyByPython(Tried):
    def work(self) -> None:
        for p in every(self):
            p.grad.add_(random.random())  # noqa: S311


class ClipsAll(Tried):
    limit = 0.1

    def work(self) -> None:
        nn.utils.clip_grad_norm_(every(self), self.limit)


class ClipsAllAtTwenty(ClipsAll):
    limit = 20.0


class ClipsAllLater(ClipsAll):
    """Once it is warm."""

    def work(self) -> None:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        if self.param_groups[0]["k"] > 6:
            super().work()


class SkipsAllAtNan(Tried):
    def work(self) -> None:
        if not all(p.grad.isfinite().all() for p in every(self)):
            for p in every(self):
                p.grad.zero_()


class SkipsAllWhenLarge(Tried):
    def work(self) -> None:
        if any(float(p.grad.abs().max()) > 500.0 for p in every(self)):
            for p in every(self):
                p.grad.zero_()


class ScalesByPlace(Tried):
    def work(self) -> None:
        for place, p in enumerate(every(self)):
            p.grad.mul_(0.5**place)


class ScalesByNumber(Tried):
    def work(self) -> None:
        for p in every(self):
            p.grad.div_(len(every(self)))


class CentersOverAll(Tried):
    def work(self) -> None:
        mean = sum(p.grad.sum() for p in every(self)) / sum(p.numel() for p in every(self))
        for p in every(self):
            p.grad.sub_(mean)


class EstimatesInItself(Tried):
    norm = 0.0

    def work(self) -> None:
        self.norm = 0.9 * self.norm + float(sum(p.grad.norm() for p in every(self)))


class EstimatesInItsGroup(Tried):
    def work(self) -> None:
        for group in self.param_groups:
            group["largest"] = max(float(p.grad.abs().max()) for p in every(self))


class EstimatesInItsState(Tried):
    def work(self) -> None:
        self.state["norm"] = sum(p.grad.norm() for p in every(self))  # type: ignore[index]


class HoldsItsParameters(Tried):
    def __init__(self, params: Any) -> None:  # noqa: ANN401
        super().__init__(params)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    def work(self) -> None:
        for p in self.mine:
            p.mul_(0.5)


class CountsInItsClass(Tried):
    count = 0

    def work(self) -> None:
        type(self).count += 1
        for p in every(self):
            p.grad.mul_(0.5**self.count)


class DecaysWithoutGradients(Tried):
    def work(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)


class NeedsAClosure(optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override] # noqa: ANN401
        super().step(closure)


class KeepsCopies(optim.SGD):
    def __init__(self, params: Any) -> None:  # noqa: ANN401
        super().__init__(params)
        self.slow = [p.clone() for group in self.param_groups for p in group["params"]]


class SavesMore(optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "tau": 1}


class HooksItself(optim.SGD):
    def __init__(self, params: Any) -> None:  # noqa: ANN401
        super().__init__(params)
        self.register_step_pre_hook(lambda *_: None)


class Regroups(optim.SGD):
    def __init__(self, params: Any) -> None:  # noqa: ANN401
        super().__init__([{"params": [p]} for group in params for p in group["params"]])


class HidesItsGroups(optim.SGD):
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"params": []}]


OVER_ALL: list[tuple[type[optim.Optimizer], str]] = [
    (Noisy, "random numbers"),
    (NoisyByPython, "random numbers"),
    (ClipsAll, "size 1: stepped one after the other"),
    (ClipsAllAtTwenty, "one after the other"),
    (ClipsAllLater, "one after the other"),
    (SkipsAllAtNan, "size nan: stepped one after the other"),
    (SkipsAllWhenLarge, "size 1000: stepped one after the other"),
    (ScalesByPlace, "one after the other"),
    (ScalesByNumber, "one after the other"),
    (CentersOverAll, "one after the other"),
    (EstimatesInItself, "changes self.norm"),
    (EstimatesInItsGroup, r"changes param_groups\[0\]\['largest'\]"),
    (EstimatesInItsState, r"self.state\['norm'\]"),
    (HoldsItsParameters, "self.mine"),
    (CountsInItsClass, "one after the other"),
    (DecaysWithoutGradients, "one after the other"),
    (NeedsAClosure, "closure"),
    (KeepsCopies, "self.slow"),
    (SavesMore, "tau in a state_dict"),
    (HooksItself, "step hooks"),
    (Regroups, "groups of its own"),
    (HidesItsGroups, "AttributeError: .*no setter"),
]


@pytest.mark.parametrize(("optimizer_class", "words"), OVER_ALL, ids=str)
def test_what_is_kept_over_all_parameters_is_named(
    optimizer_class: type[optim.Optimizer], words: str
) -> None:
    before = torch.get_rng_state()
    with pytest.raises(OptionError, match=words):
        probe(optimizer_class, groups(), {}, elementwise=False)
    assert torch.equal(before, torch.get_rng_state())
    for declared in (False, True):
        with pytest.raises(OptionError):
            StowedOptimizer(optimizer_class, groups(), states="ram", per_parameter=declared)


def test_a_class_that_is_not_known_is_not_guessed() -> None:
    class Own(optim.SGD):
        pass

    weights = [nn.Parameter(torch.ones(3))]
    with pytest.raises(OptionError, match=r"Own is not known .*per_parameter=True"):
        StowedOptimizer(Own, weights, states="ram")
    StowedOptimizer(Own, weights, states="ram", per_parameter=True)
    for name in ("AdamW", "Nobodys"):
        theirs = type(name, (optim.SGD,), {"__module__": "optimi.adamw", "__qualname__": name})
        if name == "AdamW":
            StowedOptimizer(theirs, weights, states="ram")
        else:
            with pytest.raises(OptionError, match=r"optimi\.adamw\.Nobodys is not known"):
                StowedOptimizer(theirs, weights, states="ram")


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_value_of_the_first_group_is_the_first_groups(lr: float | torch.Tensor) -> None:
    class ByTheFirst(Tried):
        def work(self) -> None:
            for p in every(self):
                p.grad.mul_(float(self.param_groups[0]["lr"]))

    two = [*groups(), {**groups()[0], "lr": 0.5}]
    probe(ByTheFirst, two, {"lr": lr}, elementwise=False)


def test_a_class_may_refuse_what_is_not_finite() -> None:
    class Strict(Tried):
        def work(self) -> None:
            if not all(p.grad.isfinite().all() for p in every(self)):
                raise ArithmeticError

    probe(Strict, groups(), {}, elementwise=False)


def test_shapes_stay_square_tall_or_wide() -> None:
    class Transposes(Tried):
        def work(self) -> None:
            for p in every(self):
                p.grad.mul_(2.0 if p.shape[0] > p.shape[-1] else 1.0)
                assert p.dim() == 1 or p.shape in {(4, 6), (6, 6), (6, 3), (1, 5)}

    shapes = [(100, 9000), (9000, 9000), (9000, 60), (1, 700), (700,)]
    many = [{"params": [nn.Parameter(torch.ones(s, device="meta")) for s in shapes]}]
    probe(Transposes, many, {}, elementwise=False)


def test_a_parameter_that_is_alone_gets_a_twin() -> None:
    alone = [{"params": [nn.Parameter(torch.ones(5))]}]
    with pytest.raises(OptionError, match="one after the other"):
        probe(ClipsAll, alone, {}, elementwise=False)


def test_instances_and_other_things_are_no_classes() -> None:
    for thing in (nn.Linear, optim.SGD([nn.Parameter(torch.ones(1))]), None):
        with pytest.raises(OptionError, match="class"):
            refuse_class(thing)
