"""Optimizer states and master weights by the model's names, of this rank's elements."""

import logging
import weakref
from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.full_tensors import resharded
from tensorstow.fsdp.sharding import host_group
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.step.step_plan import as_step
from tensorstow.tensors.dtensor import part_of

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


class MasterWeights:
    """The fp32 values of a model that is cast to 16 bits, until its optimizer has them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Cast ``model`` and keep the values before the cast; those of rank 0, as the engine does.

        Parameters on the meta device have no values: their master weights start as their weights.
        """
        # Values in host memory are not copied: the cast gives the parameters other memory.
        self._values = {
            name: parameter.detach().cpu()
            for name, parameter in model.named_parameters()
            if _has_more(parameter, dtype)
        }
        group = host_group() if self._values else None
        if group is not None:
            for values in self._values.values():
                dist.broadcast(values, 0, group=group)
        cast_model(model, dtype)

    @torch.no_grad()
    def assign(self, model: nn.Module, optimizer: PlacedOptimizer) -> None:
        """Set the master weights of the placed ``model``."""
        named = dict(model.named_parameters())
        begun = {}
        for name in owned_names(model, optimizer):
            # Popped and copied, so that the whole values of each parameter are freed in turn.
            values = self._values.pop(name, None)
            if values is not None:
                master = part_of(values, named[name], name).clone()
                begun[name] = {"step": as_step(0), "master": master}
        set_states(model, optimizer, begun)


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a model in place.

    Buffers keep their dtype, as upstream: a table of rotary frequencies is of no use in bf16.
    Running statistics alone follow, for torch's batch norm takes none of another dtype.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if isinstance(module, _NormBase):
            for buffer in module.buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(dtype)


def _has_more(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Return whether a cast to ``dtype`` loses bits that a master weight would keep."""
    is_updated = parameter.requires_grad and not parameter.is_meta
    return is_updated and parameter.dtype == torch.float32 and dtype != torch.float32


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
    # Weak: the module keeps the hook, which would keep the optimizer alive.
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
