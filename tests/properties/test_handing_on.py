"""Counters and modes of a group, of the optimizer and of its state: one step, many pieces."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from parity.piecewise import MATRICES, Pair, pair
from tensorstow import StowedOptimizer
from tensorstow.base.errors import OptimizerError, OptionError, PoisonedError
from tensorstow.optim.generic.shared_values import SharedValues, copied, options_of

SHAPES = ((130, 200), (70, 90), (8, 8), (5,))


class Base(optim.Optimizer):
    """SGD with momentum by a factor that ``counted`` gives."""

    def __init__(self, params: Any, lr: float = 0.1, **defaults: Any) -> None:  # noqa: ANN401
        super().__init__(params, {"lr": lr, **defaults})

    def counted(self, group: dict[str, Any]) -> float:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            factor = self.counted(group)
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 / (1 + factor))
                    p.sub_(mean, alpha=group["lr"] * factor)


class InGroup(Base):
    """As pytorch_optimizer: a step that the first step makes."""

    def counted(self, group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        return 1 / group["step"]


class InGroupTensor(Base):
    def counted(self, group: dict[str, Any]) -> float:
        group.setdefault("step", torch.zeros(())).add_(1)
        group.setdefault("history", []).append(float(group["step"]))
        return 1 / len(group["history"])


class InItself(Base):
    """As bitsandbytes: made ready in the first step, with a table of its own."""

    initialized = False
    total = 0

    def __init__(self, params: Any, lr: float = 0.1) -> None:  # noqa: ANN401
        super().__init__(params, lr)
        self.tables: dict[str, torch.Tensor] = {}

    def counted(self, group: dict[str, Any]) -> float:
        if group is self.param_groups[0]:
            self.total += 1
        if not self.initialized:
            self.tables["map"] = torch.linspace(0.5, 1, 16)
            self.initialized = True
        return float(self.tables["map"][self.total])


class InState(Base):
    """As SPAM: under a key that is no parameter, from the constructor on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:  # noqa: ANN401
        super().__init__(params, lr)
        self.state["current_step"] = 0  # type: ignore[index, assignment]

    def counted(self, group: dict[str, Any]) -> float:
        shared: Any = self.state
        if group is self.param_groups[0]:
            shared["current_step"] += 1
        return 1 / shared["current_step"]


class Averages(Base):
    """As schedulefree: weights over steps, and two sets of parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:  # noqa: ANN401
        super().__init__(params, lr, k=0, weight_sum=0.0, lr_max=-1.0, train_mode=False)

    def counted(self, group: dict[str, Any]) -> float:
        if not group["train_mode"]:
            message = "Optimizer was not in train mode"
            raise RuntimeError(message)
        group["k"] += 1
        group["lr_max"] = max(group["lr"], group["lr_max"])
        group["weight_sum"] += group["lr_max"] ** 2
        return group["lr_max"] ** 2 / group["weight_sum"]

    @torch.no_grad()
    def _go_over(self, *, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                for p in group["params"]:
                    if "mean" in self.state[p]:
                        p.add_(self.state[p]["mean"], alpha=0.5 if train else -0.5)
                        self.state[p]["mean"].mul_(0.5 if train else 2)
                group["train_mode"] = train

    def train(self) -> None:
        self._go_over(train=True)

    def eval(self) -> None:
        self._go_over(train=False)


def in_two_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "lr": 0.2}, {"params": parameters[2:]}]


def stowed_pair(kind: type[optim.Optimizer], tmp_path: Path) -> Pair:
    return pair(
        tmp_path, kind, {"lr": 0.1}, shapes=SHAPES, groups=in_two_groups, per_parameter=True
    )


@pytest.mark.parametrize("kind", [InGroup, InGroupTensor, InItself, InState])
def test_every_piece_sees_the_values_of_the_steps_begin(
    tmp_path: Path, kind: type[optim.Optimizer]
) -> None:
    both = stowed_pair(kind, tmp_path)
    both.step(3)
    both.assert_same()
    ours, theirs = both.ours.state_dict(), both.theirs.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    both.ours.load_state_dict(theirs)
    both.step(2, first=3)
    both.assert_same()


def test_a_step_without_gradients_counts_as_the_class_counts(tmp_path: Path) -> None:
    both = stowed_pair(InGroup, tmp_path)
    both.step(1)
    for optimizer in (both.ours, both.theirs):
        optimizer.zero_grad()
        optimizer.step()
        for p in optimizer.param_groups[1]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert [group["step"] for group in both.ours.param_groups] == [3, 3]
    both.step(1)
    both.assert_same()


def test_training_and_evaluating(tmp_path: Path) -> None:
    both = stowed_pair(Averages, tmp_path)
    optimizers: tuple[Any, Any] = (both.ours, both.theirs)
    with pytest.raises(OptimizerError, match=r"Averages took a step, .* not in train mode"):
        stowed_pair(Averages, tmp_path).step(1)
    for optimizer in optimizers:
        optimizer.train()
    both.step(2)
    traffic = both.ours._traffic()
    both.ours.train()
    assert both.ours._traffic() == traffic  # nothing to do, and nothing is moved
    for mode in ("eval", "train"):
        for optimizer in optimizers:
            getattr(optimizer, mode)()
        both.assert_same()
        assert both.ours.param_groups[0]["train_mode"] == (mode == "train")
    both.step(2, first=2)
    both.assert_same()
    other = StowedOptimizer(optim.SGD, [nn.Parameter(torch.ones(3))], states="ram")
    assert not hasattr(other, "train")
    assert not hasattr(other, "eval")


def test_a_learning_rate_that_is_a_tensor_stays_the_same_object(tmp_path: Path) -> None:
    rate = torch.tensor(0.1)
    weight = nn.Parameter(torch.ones(200, 200))
    opt = StowedOptimizer(
        InGroup, [weight], lr=rate, states="disk", dir=tmp_path, per_parameter=True
    )
    held = opt.param_groups[0]["lr"]
    weight.grad = torch.ones_like(weight)
    opt.step()
    assert opt.param_groups[0]["lr"] is held
    opt.close()


FROZEN = {
    "int8": torch.zeros(4, 3, dtype=torch.int8),
    "fp8": torch.zeros(4).to(torch.float8_e4m3fn),
    "meta": torch.zeros(4, device="meta"),
    "strided": torch.zeros(4, 4)[:, ::2],
}


@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_parameters_are_no_matter(kind: str, tmp_path: Path) -> None:
    frozen = nn.Parameter(FROZEN[kind], requires_grad=False)
    weight = nn.Parameter(torch.ones(200, 200))
    opt = StowedOptimizer(
        InGroup, [frozen, weight], states="disk", dir=tmp_path, per_parameter=True
    )
    weight.grad = torch.ones_like(weight)
    opt.step()
    assert opt.param_groups[0]["step"] == 1
    opt.close()


def test_parameters_that_are_all_frozen_are_tried_out_all_the_same() -> None:
    class Clips(optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
            super().step(closure)

    frozen = [nn.Parameter(torch.ones(3), requires_grad=False) for _ in range(2)]
    with pytest.raises(OptionError, match="one after the other"):
        StowedOptimizer(Clips, frozen, states="ram", per_parameter=True)


class DisagreesLater(Base):
    def counted(self, group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        if group["step"] > 13:  # the trial is over
            group["norm"] = float(sum(p.grad.norm() for p in group["params"]))
        return 0.5


def test_pieces_that_disagree_in_a_later_step_end_the_run(tmp_path: Path) -> None:
    both = pair(tmp_path, DisagreesLater, shapes=SHAPES[:2], per_parameter=True)
    both.step(13)
    both.give_gradients(13)
    with pytest.raises(OptionError, match=r"DisagreesLater changes param_groups\[0\]\['norm'\]"):
        both.ours.step()
    with pytest.raises(PoisonedError):
        both.ours.step()


class ByName(optim.SGD):
    """Reads torch's own group["param_names"]."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if name.endswith("weight") and p.grad is not None:
                    p.mul_(0.5)
        super().step(closure)


@pytest.mark.parametrize("states", ["ram", "disk"])
def test_a_name_goes_with_its_parameter(states: Any) -> None:  # noqa: ANN401
    model = nn.Linear(100, 100)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    named = list(model.named_parameters())[::-1]
    opt = StowedOptimizer(ByName, named, lr=0.0, states=states, per_parameter=True)
    model(torch.ones(1, 100)).sum().backward()
    opt.step()
    assert model.weight.detach().eq(0.5).all()
    assert model.bias.detach().eq(1.0).all()
    assert opt.param_groups[0]["param_names"] == ["bias", "weight"]
    more = nn.Parameter(torch.ones(300))
    opt.add_param_group({"params": [("more.weight", more)]})
    more.grad = torch.zeros(300)
    opt.step()
    assert more.detach().eq(0.5).all()
    opt.close()


def test_names_in_chunks(tmp_path: Path) -> None:
    both = pair(
        tmp_path,
        ByName,
        {"lr": 0.1, "momentum": 0.9},
        shapes=MATRICES,
        groups=lambda ps: [(f"{i}.weight", p) for i, p in enumerate(ps)],
        elementwise=True,
    )
    assert both.ours.plan()[0].how == "chunks"
    both.step(2)
    both.assert_same()


class ByLoss(Base):
    """Steps the less, the larger the loss is."""

    calls = 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]  # noqa: ANN401
        self.loss = 0.0
        if closure is not None:
            for _ in range(self.calls):
                with torch.enable_grad():
                    self.loss = float(closure())
        super().step()
        return self.loss

    def counted(self, group: dict[str, Any]) -> float:
        del group
        return 1 / (1 + self.loss)


class ByLossTwice(ByLoss):
    calls = 2


def test_the_loss_of_a_closure_is_handed_on() -> None:
    both = [torch.nn.ParameterList([torch.ones(shape) for shape in SHAPES]) for _ in range(2)]
    stowed = StowedOptimizer(ByLoss, both[1], per_parameter=True, states="disk")
    evaluated = []

    def closure(parameters: nn.ParameterList) -> torch.Tensor:
        loss = sum((p.square().mean() for p in parameters), torch.zeros(()))
        loss.backward()
        evaluated.append(parameters)
        return loss.detach()

    for optimizer, parameters in zip((ByLoss(both[0]), stowed), both, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            assert optimizer.step(lambda given=parameters: closure(given)) > 0
    assert len(evaluated) == 6
    assert all(torch.equal(p, q) for p, q in zip(*both, strict=True))
    stowed.close()


def test_a_closure_that_is_called_twice_is_refused() -> None:
    parameter = torch.ones(8, requires_grad=True)
    stowed = StowedOptimizer(ByLossTwice, [parameter], per_parameter=True, states="disk")
    parameter.grad = torch.ones(8)
    with pytest.raises(OptimizerError, match="ByLossTwice calls its closure several times"):
        stowed.step(lambda: 1.0)
    assert torch.equal(parameter, torch.ones(8))
    stowed.close()


def test_a_piece_takes_no_long_look_at_other_groups() -> None:
    """Groups with one parameter each: what is asked of each group with each piece is little."""
    parameters = [torch.ones(64, 64, requires_grad=True) for _ in range(24)]
    groups = [{"params": [p], "lr": 0.1, "betas": (0.9, 0.99)} for p in parameters]
    values = SharedValues([options_of(group) for group in groups], {}, {})
    passed = copied(values)
    assert passed.groups[0] is not groups[0]
    assert passed.groups[0]["betas"] is groups[0]["betas"]  # equal by identity: nothing to compare
    assert not values.differences(passed)
    passed.groups[3]["betas"] = (0.9, 0.98)
    passed.groups[4]["more"] = 1
    assert values.differences(passed) == ["param_groups[3]['betas']", "param_groups[4]['more']"]
