"""``TracedPlacement``: what is done with activations while a model is traced."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorstow.base.activation_placement import ActivationPlacement


@dataclass(frozen=True, slots=True)
class TracedPlacement:
    """What the blocks of a model do with their activations, and where they compute."""

    placement: ActivationPlacement = ActivationPlacement.KEEP
    device_is_host: bool = False
    """Whether the CPU computes. What comes back from disk is then in the pool's memory, which has a
    bound of its own, and is not counted as activations."""


KEPT = TracedPlacement()
"""Activations stay where they are computed."""

Traces = dict[ActivationPlacement, Sequence[ActivationPlacement]]


def traces_of(*, device_is_host: bool) -> Traces:
    """Return what to trace, least traffic first, and the placements that each trace stands for.

    "host" and "disk" leave the same activations on an accelerator.

    Args:
        device_is_host: Whether the CPU computes, whose activations are on "host" as they are.
    """
    recompute, host = ActivationPlacement.RECOMPUTE, ActivationPlacement.HOST
    disk = ActivationPlacement.DISK
    moved: Traces = {disk: [disk]} if device_is_host else {host: [host, disk]}
    return {recompute: [recompute], **moved}
