"""The values of ``overlap=``, ``accumulation_steps=`` and ``update_on=``, as types."""

from collections.abc import Callable
from typing import Literal, TypeGuard

Overlap = Literal["none", "forward", "backward"]
"""What updates run beside: nothing, the next forward, or the backward that makes gradients."""
AccumulationSteps = int | Callable[[], bool]
"""Backward passes per step, or whether the one under way is the last of its step."""
UpdateOn = Literal["host", "device", "hybrid", "auto"] | float
"""A number: "hybrid" whose device updates this share of the states."""
_WORDS = ("host", "device", "hybrid", "auto")
CHOICES = '"host", "device", "hybrid", "auto", or the share that the device updates, in (0, 1)'


def is_update_on(value: object) -> TypeGuard[UpdateOn]:
    """Return whether ``value`` is a valid ``update_on``."""
    if isinstance(value, float):
        return 0.0 < value < 1.0
    return isinstance(value, str) and value in _WORDS


def reaches_device(update_on: UpdateOn | None) -> bool:
    """Return whether updates may run on the accelerator, so that all parameters must be there."""
    return update_on not in {None, "host"}


def keyword_of(update_on: UpdateOn | None) -> str:
    """Return the keyword as users write it."""
    return f'update_on="{update_on}"' if isinstance(update_on, str) else f"update_on={update_on}"
