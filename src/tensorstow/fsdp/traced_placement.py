"""``TracedPlacement``: what is done with activations while a model is traced."""

from dataclasses import dataclass

from tensorstow.base.activation_placement import ActivationPlacement


@dataclass(frozen=True, slots=True)
class TracedPlacement:
    """What the blocks of a model do with their activations, and where they compute."""

    placement: ActivationPlacement = "keep"
    device_is_host: bool = False
    """Whether the CPU computes: what comes back from disk is in the pool's memory then, which has a
    bound of its own, and is not counted as activations."""


KEPT = TracedPlacement()
"""Activations stay where they are computed."""
