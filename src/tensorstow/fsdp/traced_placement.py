"""``TracedPlacement``: what is done with activations while a model is traced."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_leaves

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.planner.search import MicroBatching


@dataclass(frozen=True, slots=True)
class TracedPlacement:
    """What the blocks of a model do with their activations, and where they compute."""

    placement: ActivationPlacement = ActivationPlacement.KEEP
    device_is_host: bool = False
    """Whether the CPU computes. What comes back from disk is then in the pool's memory, which has a
    bound of its own, and is not counted as activations."""


KEPT = TracedPlacement()
"""Activations stay where they are computed."""


def count_of(batch: object) -> tuple[str, int]:
    """Return what a batch is counted in, and its number: tokens if a tensor in it has integers."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        if not tensor.is_floating_point():
            return "tokens", tensor.numel()
    return "samples", next((len(tensor) for tensor in tensors if tensor.ndim), 1)


def placed_elsewhere(
    trace: Callable[[TracedPlacement], Iterable[MicroBatching]], *, device_is_host: bool
) -> Iterator[MicroBatching]:
    """Yield what ``trace`` returns for each other placement, that with least traffic first.

    On an accelerator "host" and "disk" leave the same activations: one trace stands for both.
    Activations of a CPU are on "host" as they are.
    """
    recompute, host = ActivationPlacement.RECOMPUTE, ActivationPlacement.HOST
    disk = ActivationPlacement.DISK
    for alike in ([recompute], [disk] if device_is_host else [host, disk]):
        traced = list(trace(TracedPlacement(alike[0], device_is_host)))
        for placement in alike:
            yield from (replace(batching, placement=placement) for batching in traced)
