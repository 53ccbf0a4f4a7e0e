"""Optimizer states by the model's names, as tensors of this rank's elements."""

from collections.abc import Mapping

import torch
from torch import nn

from tensorstow.optim.stowed import StowedAdam

States = dict[str, dict[str, torch.Tensor]]


def owned_names(model: nn.Module, optimizer: StowedAdam) -> list[str]:
    """Return the name of each of the optimizer's parameters, in its order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def states_of(model: nn.Module, optimizer: StowedAdam) -> States:
    """Return the states of all parameters that have any; step counts among them."""
    saved = optimizer.state_dict()["state"]
    names = owned_names(model, optimizer)
    return {names[index]: dict(entry) for index, entry in saved.items()}


def put_states(
    model: nn.Module, optimizer: StowedAdam, states: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Let the states of these parameters be those given, which the next step takes over."""
    named = dict(model.named_parameters())
    for name, entry in states.items():
        optimizer.state[named[name]] = dict(entry)
