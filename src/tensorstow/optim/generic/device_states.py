"""States of parameters on an accelerator: in host memory, and on the device while they are used.

[Note: Device states] A class steps a parameter where it is, with the bits that it has there. Its
states are copied to the device for the step of their piece and back after it, so that the device
holds those of one piece at a time. Numbers (tensors of no dimension) stay where the class has them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tensorstow.optim.generic.packing import map_leaves, refuse_aliases, tensors_in


def to_device(
    entry: Mapping[str, Any], device: torch.device
) -> tuple[dict[str, Any], dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Return an entry with its tensors on ``device``, and by the ids of copies (copy, original)."""
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def copied(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.device == device:
            return leaf
        copy = leaf.to(device)
        copies[id(copy)] = copy, leaf
        return copy

    return {name: map_leaves(value, copied) for name, value in entry.items()}, copies


def to_host(
    entry: Mapping[str, Any],
    parameter: torch.Tensor,
    copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, Any]:
    """Return the entry that a step left, in host memory: in the originals of ``copies``.

    Raises OptionError for a state that shares memory with another tensor: a copy would diverge.
    """
    moving = [t for t in tensors_in(dict(entry)) if t.dim() and not t.is_cpu and t.numel()]
    refuse_aliases(moving, parameter, "in host memory", "leave the parameter to torch.optim")

    def moved(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.is_cpu:
            return leaf
        copy, original = copies.get(id(leaf), (None, None))
        # A tensor that the class has made in the step has no original.
        if copy is None or original is None or original.shape != leaf.shape:
            return leaf.to("cpu")
        # The original may lie in the ring, from which its piece is written.
        return original.copy_(leaf)

    with torch.no_grad():
        return {name: map_leaves(value, moved) for name, value in entry.items()}
