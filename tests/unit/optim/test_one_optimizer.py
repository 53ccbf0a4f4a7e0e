"""A step of an optimizer whose parameters are another's, or no longer the model's, is an error."""

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow import Adam, AdamW, Plan, StowedOptimizer, stow
from tensorstow.base.errors import OptionError

DISK = Plan(parameters="disk", states="disk")
OTHERS = "another optimizer updates: the AdamW"
PLACED = "updates: the AdamW that stow\\(\\) returned"
REPLACED = r"4 parameters \(0.weight ...\) that stow\(\) has replaced"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def train(net: nn.Module, *optimizers: Optimizer) -> float:
    loss = net(torch.ones(2, 8)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


BEFORE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "torch": lambda net: torch.optim.AdamW(net.parameters(), lr=0.1),
    "ours": lambda net: AdamW(net.parameters(), lr=0.1),
    "generic": lambda net: StowedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1),
}


@pytest.mark.parametrize(("plan", "told"), [(DISK, REPLACED), (Plan(), PLACED)])
@pytest.mark.parametrize("kind", BEFORE)
def test_an_optimizer_that_was_made_before_stow_takes_no_step(
    kind: str, plan: Plan, told: str
) -> None:
    net = model()
    old = BEFORE[kind](net)
    net, placed = stow(net, partial(AdamW, lr=0.1), plan=plan)
    with pytest.raises(OptionError, match=told):
        train(net, old)
    train(net, placed)  # which is the one to step
    placed.close()


def test_the_optimizers_of_a_model_that_is_placed_are_one() -> None:
    """Also one of torch's that is made afterwards; until the model's own is closed."""
    net, placed = stow(model(), partial(AdamW, lr=0.1), plan=Plan())
    second = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=PLACED):
        train(net, second)
    placed.close()
    assert train(net, second) > train(net, second)


@pytest.mark.parametrize("second", [Adam, AdamW, partial(StowedOptimizer, torch.optim.SGD, lr=0.1)])
def test_two_of_our_optimizers_over_a_parameter_are_an_error(
    second: Callable[..., Optimizer],
) -> None:
    net = model()
    first, other = AdamW(net.parameters()), second(list(net[1].parameters()))
    train(net, first)
    with pytest.raises(OptionError, match=f"2 parameters, which {OTHERS}"):
        train(net, other)
    first.close()  # as the error says
    train(net, other)


def test_beside_backward_the_second_optimizer_is_found_before_it_updates() -> None:
    net = model()
    other = AdamW(net.parameters())
    train(net, other)
    first = AdamW(net[0].parameters(), overlap="backward", module=net)
    before = net[0].weight.detach().clone()
    with pytest.raises(OptionError, match=OTHERS):
        train(net, first)
    assert torch.equal(net[0].weight, before)


def test_an_optimizer_counts_from_its_first_step_until_it_is_dropped() -> None:
    net = model()
    never = AdamW(net.parameters())
    dropped = AdamW(net.parameters())
    torch.optim.lr_scheduler.LambdaLR(dropped, lambda _: 1.0)  # a cycle, which nobody has collected
    train(net, dropped)
    gc.disable()
    try:
        del dropped
        train(net, AdamW(net.parameters()))
    finally:
        gc.enable()
    assert not never.state


def test_an_optimizer_that_failed_does_not_count() -> None:
    net = model()
    failed = AdamW(net.parameters())

    def fail() -> None:
        message = "as a disk does"
        raise OSError(message)

    failed._register_update_hook(fail)
    with pytest.raises(OSError, match="as a disk does"):
        train(net, failed)
    train(net, AdamW(net.parameters()))


def test_a_child_may_make_an_optimizer_of_its_own() -> None:
    net = model()
    first = AdamW(net.parameters())
    train(net, first)
    child = os.fork()
    if child == 0:
        try:
            train(net, StowedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1, states="host"))
        except BaseException:  # noqa: BLE001
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    train(net, first)


class Sharing(Optimizer):
    """As SAM, Lookahead and others: an optimizer of the groups of the one that it steps."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.param_groups, self.base = base.param_groups, base

    def step(self, closure: Any = None) -> None:  # noqa: ANN401
        self.base.step(closure)


def test_an_optimizer_around_another_is_that_one() -> None:
    net, placed = stow(model(), partial(AdamW, lr=0.01), plan=Plan())
    outer = Sharing(placed)
    assert train(net, outer) > train(net, outer)
    placed.close()


def test_other_parameters_are_free() -> None:
    both = model(), model()
    optimizers = [AdamW(net.parameters()) for net in both]
    placed, third = stow(model(), partial(AdamW, lr=0.1), plan=DISK)
    for _ in range(2):
        for net, optimizer in zip(both, optimizers, strict=True):
            train(net, optimizer)
        train(placed, third)
    plain = model()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    third.close()


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_parameters_that_are_no_longer_the_models_are_an_error(overlap: Any) -> None:  # noqa: ANN401
    net = model()
    optimizer = AdamW(net.parameters(), module=net, overlap=overlap)
    optimizer.step()  # without a gradient, which is no error of its own
    net.load_state_dict(model().state_dict(), assign=True)
    with pytest.raises(OptionError, match=r"0\.weight of module="):
        train(net, optimizer)


def test_a_run_that_is_resumed_counts_again(tmp_path: Path) -> None:
    net = model()
    first = AdamW(net.parameters(), dir=tmp_path / "run")
    train(net, first)
    first.commit()
    train(net, first)
    assert first.resume() == 1
    with pytest.raises(OptionError, match=OTHERS):
        train(net, AdamW(net.parameters()))
    first.close()
