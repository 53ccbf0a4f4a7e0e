"""What a class steps in place of a sharded parameter: this rank's elements, as a plain tensor.

[Note: Leaves] A class's own step knows plain tensors. Of a DTensor, or of a parameter that is whole
and of which a rank updates its rows, it is given a leaf: a view of this rank's elements, with this
rank's elements of the gradient. States are of the leaf, and belong to the parameter. Rows are
enough for an elementwise class alone; for others a leaf is the whole, gathered ([Note: Owners]).
"""

from collections.abc import Mapping
from typing import Any

import torch

from tensorstow.io.device_link import is_remote
from tensorstow.tensors.dtensor import (
    gradient_of,
    has_offloaded_gradient,
    is_sharded,
    layout_of,
    part_of,
    set_gradient,
    shard_of,
    sharded_like,
)


def leaf_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor to step: the parameter, or a view of this rank's elements of it.

    A view has no gradient; it counts versions with the parameter.
    """
    if layout_of(parameter) is None:
        return parameter
    return shard_of(parameter).detach().requires_grad_(parameter.requires_grad)


def leaf_with_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor to step, with its gradient; None: this rank has none to step by."""
    if layout_of(parameter) is None and not has_offloaded_gradient(parameter):
        return None if parameter.grad is None else parameter
    gradient = gradient_of(parameter)
    if gradient is None:
        return None
    # The leaf gets the gradient, and the user's ``.grad`` stays.
    leaf = leaf_of(parameter) if layout_of(parameter) is not None else parameter.detach()
    if is_remote(leaf):  # gradients that wait in host memory come back
        gradient = gradient.to(leaf.device)
    set_gradient(
        leaf.requires_grad_(), gradient
    )  # check_gradient raises an error if it does not fit
    return leaf


def own_states(entry: Mapping[str, Any], parameter: torch.Tensor, name: str) -> dict[str, Any]:
    """Return a saved entry with this rank's elements of what is sharded, or whole, there."""
    if layout_of(parameter) is None:
        return dict(entry)
    shape = shard_of(parameter).shape
    return {
        key: part_of(value, parameter, f"The saved {key!r} of {name}")
        if isinstance(value, torch.Tensor)
        and (is_sharded(value) or (value.shape == parameter.shape != shape))
        else value
        for key, value in entry.items()
    }


def sharded_states(entry: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return an entry in which states of a sharded parameter's elements are DTensors like it."""
    if layout_of(parameter) is None:
        return entry
    shape = shard_of(parameter).shape
    return {
        key: sharded_like(parameter, value)
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape
        else value
        for key, value in entry.items()
    }
