"""What upstream writes on sharded parameters: ``ds_id``, ``ds_status``, ``ds_shape``, ...

Scripts look for these to see whether a parameter is to be gathered before it is read.
"""

from enum import Enum
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_IDS = count()


class ZeroParamStatus(Enum):
    """What of a sharded parameter a rank has."""

    AVAILABLE = 1
    """All of it."""
    NOT_AVAILABLE = 2
    """Its shard."""
    INFLIGHT = 3
    """Upstream's, for one that is being gathered; no parameter has it here."""


def mark_parameters(module: nn.Module) -> None:
    """Give the sharded parameters of a module, which is resharded, upstream's attributes."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            mark(parameter, next(_IDS), ZeroParamStatus.NOT_AVAILABLE)


def mark_whole(parameter: torch.Tensor, marked: torch.Tensor) -> None:
    """Give a parameter that is whole for a while the attributes that its shard has.

    Nothing is done if ``marked``, which holds its shard meanwhile, has none of them.
    """
    number = getattr(marked, "ds_id", None)
    if number is not None:
        mark(parameter, number, ZeroParamStatus.AVAILABLE)


def mark(parameter: Any, number: int, status: ZeroParamStatus) -> None:
    """Write the attributes: a number of this process, and what this rank has of the parameter."""
    parameter.ds_id, parameter.ds_status = number, status
    parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
    parameter.ds_persist = False  # none stays whole between uses


def is_zero_param(parameter: object) -> bool:
    """Return whether a parameter is sharded under stage 3: whether it has ``ds_id``."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")
