"""Modules that have the weights of all experts of a layer, and are told which of them are used."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

ROUTED = "top_k_index"
"""The argument of transformers' experts: the numbers of the experts of each token."""


def is_of_experts(module: nn.Module) -> bool:
    """Return whether a module has the weights of several experts, and is told which are used."""
    matrices = [p for p in module.parameters(recurse=False) if p.ndim > 1]
    return (
        len({len(p) for p in matrices}) == 1
        and len(matrices) == len(list(module.parameters()))
        and ROUTED in inspect.signature(module.forward).parameters
    )


def routing_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the numbers of experts that a call of such a module is given."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    indices: Tensor = bound.arguments[ROUTED]
    return indices


def routed_experts(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> frozenset[int]:
    """Return the experts that a call of such a module uses."""
    count = len(next(module.parameters()))
    used: Any = routing_of(module, args, kwargs)
    return frozenset(i for i in used.unique().tolist() if i < count)  # else: of another rank
