"""The user's callable that makes the optimizer, and what it is told of where states live."""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import parse_size
from tensorstow.base.tiers import Tier
from tensorstow.optim.stowed_adam import StowedAdam

Make = Callable[..., StowedAdam]


_PLACED: dict[str, Any] = {
    "states": "host",
    "overlap": "none",
    "update_on": None,
    "accumulation_steps": 1,
    "ram_budget": None,
    "dir": None,
}
"""What a plan decides, and what holds where it says nothing."""
_FREE = frozenset({"ram_budget", "dir", "update_on"})
"""What may be said to the optimizer where neither plan nor ``stow`` was told."""


def placement_of(
    plan: Plan, model: nn.Module, directory: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """Return the keywords that carry a plan to an optimizer, where not its defaults."""
    placed: dict[str, Any] = {"module": model}
    if plan.states == Tier.DISK:
        placed["states"] = "disk"
    if plan.overlap != "none":
        placed["overlap"] = plan.overlap
    if plan.update_on is not None:
        placed["update_on"] = plan.update_on
    if plan.overlap == "backward" and plan.accumulation_steps > 1:
        placed["accumulation_steps"] = plan.accumulation_steps
    if plan.ram_budget is not None:
        placed["ram_budget"] = plan.ram_budget
    if directory is not None:
        placed["dir"] = directory
    return placed


def asked_of(optimizer: Make) -> dict[str, Any]:
    """Return the keywords that the user has given with ``functools.partial``."""
    return dict(optimizer.keywords) if isinstance(optimizer, partial) else {}


def check(optimizer: Make, placed: Mapping[str, Any]) -> None:
    """Raise OptionError unless ``optimizer`` takes these keywords, and says nothing else."""
    for name, value in asked_of(optimizer).items():
        if name in _FREE and name not in placed:
            continue
        said = "host" if (name, value) == ("states", "ram") else value
        if name in _PLACED and placed.get(name, _PLACED[name]) != said:
            message = (
                f"{name}={value!r} was given to the optimizer, and the plan says"
                f" {placed.get(name, _PLACED[name])!r}. Say it in one place: in the plan."
            )
            raise OptionError(message)
    try:
        taken = inspect.signature(optimizer).parameters
    except ValueError as error:  # a partial with a keyword that its function does not take
        message = f"The optimizer cannot be called so: {error.__cause__ or error}."
        raise OptionError(message) from error
    if any(p.kind == inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return
    missing = sorted(name for name in placed if name not in taken)
    if missing:
        message = (
            f"The optimizer's function does not take {', '.join(missing)}, by which it is told"
            " where states live. Let it take **placement and pass that on:"
            " def make(named, **placement): return tensorstow.AdamW(groups, **placement)."
        )
        raise OptionError(message)


def make(optimizer: Make, model: nn.Module, placed: dict[str, Any]) -> StowedAdam:
    """Return the optimizer over the model's named parameters, checked to be one of ours, placed so.

    Raises OptionError where the user's function made another one, or dropped the keywords.
    """
    named = [(name, p) for name, p in model.named_parameters()]
    made: object = optimizer(named, **placed)
    if not isinstance(made, StowedAdam):
        message = (
            f"The optimizer's function returned a {type(made).__name__}: it is to return a"
            " tensorstow.AdamW or tensorstow.Adam."
        )
        raise OptionError(message)
    where = made.stowage.placement
    found = {
        "states": made.placement_of_states,
        "overlap": made.stowage.overlap,
        "update_on": made.stowage.update_on,
        "dir": bool(where.directories),
        "ram_budget": where.ram_budget,
    }
    for name, value in found.items():
        if name in _FREE and name not in placed:
            continue
        wanted = placed.get(name, _PLACED[name])
        if name == "ram_budget" and wanted is not None:
            wanted = parse_size(wanted, name)
        if value != (wanted is not None if name == "dir" else wanted):
            made.close()
            message = (
                "The optimizer's function did not pass on the keywords it was given: the plan has"
                f" {name}={wanted!r} and the optimizer has not. Pass **placement on to it."
            )
            raise OptionError(message)
    return made
