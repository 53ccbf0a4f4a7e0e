"""Blocks that run forward again in backward: the bits, and how they end."""

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn

from models import AttentionBlock
from tensorstow.activations.recompute import Recompute
from tensorstow.base.errors import OptionError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(AttentionBlock(8, 16, dropout=0.5) for _ in range(2)))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(torch.ones(2, 4, 8)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_random_numbers_are_drawn_again_alike() -> None:
    model = net()
    want = gradients(model)
    calls = []
    model[1].norm.register_forward_hook(lambda *_: calls.append(1))
    recompute = Recompute(model)
    assert all(map(torch.equal, gradients(model), want))
    assert len(calls) == 2
    recompute.close()
    recompute.close()
    assert all(map(torch.equal, gradients(model), want))
    assert len(calls) == 3


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copy", [deepcopy, pickled])
def test_a_copy_recomputes_by_its_own_weights(copy: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    Recompute(model)
    copied = copy(model)
    assert "forward" in vars(copied[0])
    want = gradients(copied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(map(torch.equal, gradients(copied), want))


def test_a_graph_of_before_the_end_still_has_its_backward() -> None:
    model = net()
    want = gradients(model)
    recompute = Recompute(model)
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(torch.ones(2, 4, 8)).square().sum()
    recompute.close()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))


def test_a_forward_of_somebody_else_is_put_back() -> None:
    block = nn.Linear(2, 2)
    block.forward = other = lambda x: 2 * x
    Recompute([block]).close()
    assert block.forward is other


def test_a_wrapper_round_ours_calls_what_is_under_it_after_the_end() -> None:
    block, calls = nn.Linear(2, 2), []
    inner = block.forward

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return inner(x) ** 2

    block.forward = counted
    recompute = Recompute([block])
    ours = block.forward
    block.forward = lambda x: ours(x) + 1
    block(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 2
    recompute.close()
    block(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 3


class Cached(nn.Module):
    def forward(self, x: torch.Tensor, past_key_values: list[torch.Tensor]) -> torch.Tensor:
        past_key_values.append(x)
        return x


def test_a_cache_that_would_be_filled_twice_is_refused() -> None:
    block, cache = Cached(), []
    Recompute([block])
    with pytest.raises(OptionError, match="use_cache = False"):
        block(torch.ones(2), past_key_values=cache)
    with torch.no_grad():
        block(torch.ones(2), past_key_values=cache)
    assert len(cache) == 1
