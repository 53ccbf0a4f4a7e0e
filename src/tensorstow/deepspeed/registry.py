"""Finds the engine of a parameter, for functions that are given a parameter alone."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.optim.stowed_adam import StowedAdam


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class RegisteredModel:
    """A placed model and its optimizer, registered as long as its engine holds this object."""

    module: nn.Module
    optimizer: StowedAdam


_ALL: "weakref.WeakSet[RegisteredModel]" = weakref.WeakSet()


def register(placed: RegisteredModel) -> RegisteredModel:
    """Register a model until ``placed`` is garbage collected."""
    _ALL.add(placed)
    return placed


def optimizer_of(parameter: torch.Tensor) -> StowedAdam:
    """Return the optimizer of ``parameter``; raises OptionError if there is none."""
    for placed in _ALL:
        for group in placed.optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return placed.optimizer
    message = (
        f"A tensor of shape {tuple(parameter.shape)} was given that is no parameter of an engine:"
        " use engine.parameters(), after initialize() and outside of forward."
    )
    raise OptionError(message)


def holders_of(parameter: torch.Tensor) -> Iterator[tuple[nn.Module, str]]:
    """Yield the module and attribute name of every place that has ``parameter``."""
    for placed in list(_ALL):
        for module in placed.module.modules():
            for name, found in list(module._parameters.items()):  # noqa: SLF001
                if found is parameter:
                    yield module, name
