"""Which models are placed: DeepSpeed's functions are told a parameter, and nothing else."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.optim.stowed_adam import StowedAdam


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class RegisteredModel:
    """A placed model and its optimizer, for as long as its engine holds this."""

    module: nn.Module
    optimizer: StowedAdam


_ALL: "weakref.WeakSet[RegisteredModel]" = weakref.WeakSet()


def register(placed: RegisteredModel) -> RegisteredModel:
    """Let a model be found until ``placed`` is gone."""
    _ALL.add(placed)
    return placed


def optimizer_of(parameter: torch.Tensor) -> StowedAdam:
    """Return the optimizer that has ``parameter``; raises OptionError where none has."""
    for placed in _ALL:
        for group in placed.optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return placed.optimizer
    message = (
        f"A tensor of shape {tuple(parameter.shape)} was given that no engine's optimizer has:"
        " take parameters from engine.parameters(), after initialize() and outside of forward."
    )
    raise OptionError(message)


def holders_of(parameter: torch.Tensor) -> Iterator[tuple[nn.Module, str]]:
    """Yield every place in a placed model that has ``parameter``: module and attribute."""
    for placed in list(_ALL):
        for module in placed.module.modules():
            for name, found in list(module._parameters.items()):  # noqa: SLF001
                if found is parameter:
                    yield module, name
