"""Optimizer states by the model's names, as tensors of this rank's elements."""

import logging
import weakref
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.full_tensors import resharded
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.optim.stowed_adam import StowedAdam

logger = logging.getLogger("tensorstow")

StatesByName = dict[str, dict[str, Any]]
"""Tensors, of this rank's elements or small ones, and numbers."""


def group_names(model: nn.Module, optimizer: PlacedOptimizer) -> list[list[str]]:
    """Return the names of the parameters of each group."""
    names = {id(p): name for name, p in resharded(model).named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def owned_names(model: nn.Module, optimizer: PlacedOptimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in its order."""
    return [name for names in group_names(model, optimizer) for name in names]


def states_of(model: nn.Module, optimizer: PlacedOptimizer) -> StatesByName:
    """Return the states of all parameters that have any, with their step counts.

    Raises OptionError if ``optimizer.state`` has a key that is not a parameter.
    """
    saved = optimizer.state_dict()["state"]
    names = owned_names(model, optimizer)
    foreign = [key for key in saved if not (isinstance(key, int) and 0 <= key < len(names))]
    if foreign:
        message = (
            f"optimizer.state has the key {foreign[0]!r}, which is not a parameter: a checkpoint"
            " saves states by parameter names. Remove it, and save it in client_state instead."
        )
        raise OptionError(message)
    return {names[index]: dict(entry) for index, entry in saved.items()}


def set_states(
    model: nn.Module, optimizer: PlacedOptimizer, states: Mapping[str, Mapping[str, Any]]
) -> None:
    """Set the states of these parameters; the next step uses them."""
    named = dict(resharded(model).named_parameters())
    for name, entry in states.items():
        optimizer.state[named[name]] = dict(entry)


def drop_unused_masters(optimizer: PlacedOptimizer) -> None:
    """Drop master weights that no step has used, because the weights were just loaded."""
    if not isinstance(optimizer, StowedAdam):
        return  # which has none
    entries: dict[Any, Any] = optimizer.state  # users keep some under keys of their own
    of_parameters = {p: entry for p, entry in entries.items() if isinstance(p, torch.Tensor)}
    for parameter in [p for p, entry in of_parameters.items() if not entry.get("step")]:
        del optimizer.state[parameter]


def watch_loads(module: nn.Module, optimizer: PlacedOptimizer) -> None:
    """Drop such master weights at each ``load_state_dict`` of the module."""
    reference = weakref.ref(optimizer)

    def loaded(*_: object) -> None:
        alive = reference()
        if alive is not None:
            drop_unused_masters(alive)

    register: Any = module.register_load_state_dict_post_hook
    register(loaded)


_OF_DEVICE = ("lp_params", "lp_grads")
"""What may be on an accelerator, of what upstream's ``offload_states`` moves."""


def refuse_states_that_stay(module: nn.Module, include: Container[str] | None, device: str) -> None:
    """Raise OptionError if what is asked for is on an accelerator; log it if all is asked for."""
    if device != "cpu":
        message = f"offload_states(device={str(device)!r}) was called: states are moved to the cpu."
        raise OptionError(message)
    if all(
        p.device.type == "cpu" or storage_of(p) is not None for p in resharded(module).parameters()
    ):
        return
    asked = [name for name in _OF_DEVICE if include is not None and name in include]
    if asked:
        message = (
            f"offload_states() was asked for {', '.join(asked)}, which stay on the accelerator:"
            ' weights are in host memory with zero_optimization.offload_param.device="cpu".'
        )
        raise OptionError(message)
    if include is None:
        logger.info("offload_states(): weights and gradients stay on the accelerator")
