"""Options of the optimizer among the keywords of ``stow``."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow import AdamW, Plan, StowedOptimizer, stow
from tensorstow.base.errors import KeywordError, OptionError

PLAN = Plan()
SGD = torch.optim.SGD


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def make(named: Iterable[tuple[str, nn.Parameter]], *, rate: float, **placement: Any) -> AdamW:  # noqa: ANN401
    return AdamW(named, lr=rate, **placement)


def trained(optimizer: Any, **options: Any) -> list[torch.Tensor]:  # noqa: ANN401
    placed, stepped = stow(model(), optimizer, plan=PLAN, **options)
    placed(torch.ones(2, 4)).sum().backward()
    stepped.step()
    return [parameter.detach().clone() for parameter in placed.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "options", "bound"),
    [
        (AdamW, {"lr": 0.5, "betas": (0.5, 0.9)}, partial(AdamW, lr=0.5, betas=(0.5, 0.9))),
        (partial(AdamW, lr=0.5), {"eps": 0.1}, partial(AdamW, lr=0.5, eps=0.1)),
        (partial(StowedOptimizer, SGD), {"lr": 0.5}, partial(StowedOptimizer, SGD, lr=0.5)),
        (make, {"rate": 0.5}, partial(make, rate=0.5)),
    ],
    ids=["class", "partial", "stowed", "function"],
)
def test_options_are_the_optimizers(optimizer: Any, options: dict[str, Any], bound: Any) -> None:  # noqa: ANN401
    given, other = trained(optimizer, **options), trained(bound)
    assert all(map(torch.equal, given, other))
    assert not all(map(torch.equal, given, (p.detach() for p in model().parameters())))


@pytest.mark.parametrize(
    ("optimizer", "wrong", "message"),
    [
        (AdamW, "weight_decai", "mean weight_decay="),
        (AdamW, "bugdet", "mean budget="),
        (AdamW, "zzz", r"It has plan, .*, batch, lr, betas, .*, policy\."),
        (AdamW, "params", "It has plan"),
        (partial(AdamW, lr=1.0), "state_formt", "mean state_format="),
        (partial(StowedOptimizer, SGD, lr=1.0), "momentun", "mean momentum="),
        (partial(StowedOptimizer, SGD, lr=1.0), "per_paramete", "mean per_parameter="),
        (torch.optim.AdamW, "lrr", "mean lr="),
        (None, "wieghts", "mean weights="),
        (None, "lr", "It has plan, "),
    ],
)
def test_a_misspelled_option_is_named(optimizer: Any, wrong: str, message: str) -> None:  # noqa: ANN401
    net = model()
    before = list(net.parameters())
    with pytest.raises(KeywordError, match=rf"^stow\(\) was called with {wrong}=.*{message}"):
        stow(net, optimizer, plan=PLAN, **{wrong: 1})
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize(
    ("optimizer", "options", "call"),
    [
        (torch.optim.AdamW, {}, "model, tensorstow.AdamW"),
        (torch.optim.Adam, {"lr": 0.1}, "model, tensorstow.Adam, lr=0.1"),
        (SGD, {"lr": 0.1}, "model, partial(tensorstow.StowedOptimizer, torch.optim.SGD), lr=0.1"),
    ],
)
@pytest.mark.parametrize("plan", ["auto", PLAN])
def test_a_class_of_torch_is_answered_with_what_to_write(
    optimizer: Any,  # noqa: ANN401
    options: dict[str, Any],
    call: str,
    plan: Any,  # noqa: ANN401
) -> None:
    with pytest.raises(OptionError) as caught:
        stow(model(), optimizer, plan=plan, **options)
    assert str(caught.value).endswith(f"Use stow({call}).")
    names = {"tensorstow": tensorstow, "torch": torch, "partial": partial, "stow": stow}
    _, placed = eval(f"stow({call}, plan=PLAN)", {**names, "model": model(), "PLAN": PLAN})  # noqa: S307  # what a reader types
    assert placed is not None


def test_a_stowed_optimizer_needs_its_class() -> None:
    for given in (StowedOptimizer, partial(StowedOptimizer, lr=0.1)):
        with pytest.raises(OptionError, match="given without a class of torch"):
            stow(model(), given, plan=PLAN)


def test_each_keyword_is_listed_once() -> None:
    with pytest.raises(KeywordError, match=r"learning_rate=, .* It has ") as caught:
        stow(model(), AdamW, plan=PLAN, learning_rate=1e-3)
    listed = str(caught.value).split("It has ")[1].rstrip(".").split(", ")
    assert "dir" in listed
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("tier", ["device", "gpu", "cuda"])
def test_states_on_the_gpu_are_an_error_of_stow_too(tier: str) -> None:
    with pytest.raises(OptionError, match="states live on the host or on disk"):
        stow(model(), AdamW, states=tier)


def test_what_the_plan_decides_is_said_there() -> None:
    with pytest.raises(OptionError, match=r"states='disk' was given .*Say it in one place"):
        stow(model(), AdamW, plan=PLAN, states="disk")
