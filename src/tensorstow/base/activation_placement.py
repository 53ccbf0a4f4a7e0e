"""The values of ``Plan.activations``, as a type."""

from typing import Literal, get_args

from tensorstow.base.errors import OptionError

ActivationPlacement = Literal["keep", "recompute", "host", "disk"]
"""What is done with the tensors that a block saves for its backward: they stay where they were
computed, or backward computes them again from the block's inputs, or they wait elsewhere."""


def activation_placement(value: object, name: str) -> ActivationPlacement:
    """Return a valid placement of activations; "ram" is another word for "host".

    Args:
        value: What was given.
        name: What the error calls it.

    Raises:
        OptionError: It is none.
    """
    known: tuple[ActivationPlacement, ...] = get_args(ActivationPlacement)
    for each in known:
        if str(value) == each or (value, each) == ("ram", "host"):
            return each
    message = f"{name}={value!r} was given: activations are one of {', '.join(map(repr, known))}."
    raise OptionError(message)
