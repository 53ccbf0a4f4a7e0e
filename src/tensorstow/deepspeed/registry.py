"""Finds the engine of a parameter, for functions that are given a parameter alone.

A sharded parameter has upstream's attributes too (``ds_id``, ``ds_status``, ``ds_shape``, ...), by
which scripts see whether it is to be gathered before it is read.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.full_tensors import note_parameters, resharded
from tensorstow.optim.placed import PlacedOptimizer

SHARDS_PARAMETERS = 3
"""The stage from which on parameters are sharded."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class RegisteredModel:
    """A placed model and its optimizer, registered as long as its engine holds this object."""

    module: nn.Module
    optimizer: PlacedOptimizer
    stage: int = SHARDS_PARAMETERS
    """ZeRO's."""
    checks_writes: bool = False
    """Whether a write that is dropped is an error (``enable_sanity_checks``)."""


_OWNERS: Any = WeakIdKeyDictionary()
"""Weak references to the registered models, by parameter."""
_PLACED: Any = WeakIdKeyDictionary()
"""Weak references to the parameters that took the place of those that the model had before."""
_IDS = count()


class ZeroParamStatus(Enum):
    """What of a sharded parameter a rank has."""

    AVAILABLE = 1
    """All of it."""
    NOT_AVAILABLE = 2
    """Its shard."""
    INFLIGHT = 3
    """Upstream's, for one that is being gathered; no parameter has it here."""


def register(placed: RegisteredModel) -> RegisteredModel:
    """Register a model until ``placed`` is garbage collected; mark its sharded parameters."""
    reference = weakref.ref(placed)
    for parameter in resharded(placed.module).parameters():
        _OWNERS[parameter] = reference
        if placed.stage == SHARDS_PARAMETERS and isinstance(parameter, DTensor):
            _mark(parameter, next(_IDS), ZeroParamStatus.NOT_AVAILABLE)
    note_parameters(placed.module)
    return placed


class PlacedParameters:
    """The parameters that a model has before it is placed, and those that replace them."""

    def __init__(self, model: nn.Module) -> None:
        """Hold the parameters of ``model`` weakly: sharding frees them one by one."""
        named = model.named_parameters(remove_duplicate=False)
        # Those on the meta device keep their objects, and must have no references to get memory.
        self._before = {name: weakref.ref(p) for name, p in named if not p.is_meta}

    def note(self, placed: nn.Module) -> None:
        """Record the replacements of parameters that are still alive, by name."""
        after = dict(resharded(placed).named_parameters(remove_duplicate=False))
        for name, reference in self._before.items():
            parameter = reference()
            if parameter is not None and after[name] is not parameter:
                _PLACED[parameter] = weakref.ref(after[name])


def placed_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter that ``initialize`` put in place of this one; itself if none."""
    reference = _PLACED.get(parameter)
    now: torch.Tensor | None = None if reference is None else reference()
    return parameter if now is None else now


def owner_of(parameter: torch.Tensor) -> RegisteredModel | None:
    """Return the model that has ``parameter``; None if there is none."""
    reference = _OWNERS.get(placed_of(parameter))
    owner: RegisteredModel | None = None if reference is None else reference()
    return owner


def optimizer_of(parameter: torch.Tensor) -> PlacedOptimizer:
    """Return the optimizer of ``parameter``; raises OptionError if there is none."""
    owner = owner_of(parameter)
    if owner is not None:
        return owner.optimizer
    message = (
        f"A tensor of shape {tuple(parameter.shape)} was given that is not an engine's parameter:"
        " use engine.parameters(), after initialize() and outside of forward."
    )
    raise OptionError(message)


def registered() -> Mapping[int, RegisteredModel]:
    """Return the registered models that are alive, by ``id``."""
    alive = [reference() for reference in _OWNERS.values()]
    return {id(owner): owner for owner in alive if owner is not None}


def mark_whole(parameter: torch.Tensor, marked: torch.Tensor) -> None:
    """Give a parameter that is whole for a while the attributes that its shard has.

    Nothing is done if ``marked``, which holds its shard meanwhile, has none of them.
    """
    number = getattr(marked, "ds_id", None)
    if number is not None:
        _mark(parameter, number, ZeroParamStatus.AVAILABLE)


def _mark(parameter: Any, number: int, status: ZeroParamStatus) -> None:
    """Write the attributes: a number of this process, and what this rank has of the parameter."""
    parameter.ds_id, parameter.ds_status = number, status
    parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
    parameter.ds_persist = False  # none stays whole between uses
