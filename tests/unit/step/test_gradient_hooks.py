"""Hooks on parameters: a frozen one gets its own later, and all end with what has put them."""

import torch
from torch import nn

from tensorstow.step.param_table import GradientHooks


def test_a_frozen_parameter_is_watched_once_it_is_not() -> None:
    told: list[torch.Tensor] = []
    hooks = GradientHooks(told.append)
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    hooks.add(weight)
    hooks.add(frozen)
    torch.autograd.backward((weight * frozen).sum())
    assert [id(p) for p in told] == [id(weight)]
    frozen.requires_grad_()
    hooks.update()
    hooks.update()
    torch.autograd.backward((weight * frozen).sum())
    assert sorted(map(id, told[1:])) == sorted([id(weight), id(frozen)])


def test_hooks_are_taken_off_by_hand_and_with_their_object() -> None:
    told: list[torch.Tensor] = []
    hooks = GradientHooks(told.append)
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    hooks.add(weight)
    hooks.add(frozen)
    hooks.clear()
    frozen.requires_grad_()
    hooks.update()
    torch.autograd.backward((weight * frozen).sum())
    hooks.add(weight)
    del hooks
    torch.autograd.backward(weight.sum())
    assert told == []
