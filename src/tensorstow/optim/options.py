"""Reads and checks the keywords of an optimizer's constructor, before any allocation."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

import numpy as np
import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import parse_size
from tensorstow.base.update_on import (
    CHOICES,
    AccumulationSteps,
    Overlap,
    UpdateOn,
    is_update_on,
    keyword_of,
    reaches_device,
)
from tensorstow.checkpoint.run import Checkpoints, Extra, Interval, RunOptions
from tensorstow.formats.state_format import StateFormat
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement
from tensorstow.step.validation import refuse_beside

StatePlacement = Literal["host", "ram", "disk"] | float
_NUMBERS = (int, float, np.integer, np.floating)
_FRACTIONS = {"host": 0.0, "ram": 0.0, "disk": 1.0}
Durability = Literal["commit", "none"] | None
DirectoryOption = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


def placement(
    states: StatePlacement,
    directory: DirectoryOption,
    ram_budget: str | int | None,
    durability: Durability = "none",
) -> Placement:
    """Read ``states=``, ``dir=``, ``ram_budget=`` and ``durability=``.

    Raises OptionError for what makes no sense.
    """
    if durability not in {None, "commit", "none"}:
        message = f'durability={durability!r} was given: use "commit" or "none" (scratch).'
        raise OptionError(message)
    fraction = _fraction(states)
    durable = durability == "commit" or (durability is None and directory is not None)
    if durable and directory is None:
        message = (
            'durability="commit" was requested without dir=: name the directory from which the'
            " run is to be resumed."
        )
        raise OptionError(message)
    if fraction == 0.0 and not durable and (directory is not None or ram_budget is not None):
        name = "dir" if directory is not None else "ram_budget"
        message = (
            f"{name}= was given with states={states!r}, which puts nothing on disk. Leave {name}"
            ' out, or ask for states="disk" or a fraction.'
        )
        raise OptionError(message)
    budget = None if ram_budget is None else parse_size(ram_budget, "ram_budget")
    return Placement(fraction, directories(directory), budget, durable)


def offload_policy(
    where: Placement,
    *,
    policy: PipelinePolicy | None,
    overlap: Overlap,
    state_format: str | None,
    amsgrad: bool,
    update_on: UpdateOn | None,
) -> OffloadPolicy:
    """Return the policy of keywords about the place, format and updates of states.

    Raises:
        OptionError: A value that cannot be used, or values that contradict each other.
    """
    if overlap not in get_args(Overlap):
        message = f'overlap={overlap!r} was given: it is "none", "forward" or "backward".'
        raise OptionError(message)
    return OffloadPolicy(
        where,
        policy or PipelinePolicy(),
        overlap,
        _state_format(state_format, amsgrad=amsgrad),
        _update_on(update_on, overlap),
    )


def run_options(
    module: torch.nn.Module | None,
    *,
    accumulation_steps: AccumulationSteps,
    commit_every: str | int | None,
    extra: Callable[[], Extra] | None,
    checkpoints: Checkpoints = "full",
    durable: bool = True,
) -> RunOptions:
    """Return the options of keywords about a durable run.

    Raises:
        OptionError: ``module`` is no module, ``extra`` no function, ``commit_every`` no interval,
            or ``checkpoints`` asks for tickets of a run that is not ``durable``.
    """
    if checkpoints not in get_args(Checkpoints):
        message = f'checkpoints={checkpoints!r} was given: it is "full" or "ticket".'
        raise OptionError(message)
    if checkpoints == "ticket" and not durable:
        message = (
            'checkpoints="ticket" was given, and the states are scratch: a ticket would name what'
            " ends with the process. Name the run's directory with dir=."
        )
        raise OptionError(message)
    if module is not None and not _is_module(module):
        message = f"module={module!r} was given: pass the model, a torch.nn.Module."
        raise OptionError(message)
    if extra is not None and not _is_function(extra):
        message = (
            f"extra={extra!r} was given: pass a function that returns a dict; it is called at each"
            " commit."
        )
        raise OptionError(message)
    return RunOptions(
        module=module,
        accumulation_steps=accumulation_steps,
        commit_every=Interval.parse(commit_every),
        extra=extra,
        checkpoints=checkpoints,
    )


def _is_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module)


def _is_function(value: object) -> bool:
    return callable(value)


def _update_on(where: UpdateOn | None, overlap: Overlap) -> UpdateOn | None:
    """Return the user's ``update_on``, checked."""
    if where is not None and not is_update_on(where):
        message = f"update_on={where!r} was given: it is {CHOICES}."
        raise OptionError(message)
    if reaches_device(where):
        refuse_beside(overlap, f"{keyword_of(where)} was requested")
    return where


def _state_format(name: str | None, *, amsgrad: bool) -> StateFormat | None:
    if name is None:
        return None
    if name not in set(StateFormat):
        known = ", ".join(f'"{f.value}"' for f in StateFormat)
        message = f"state_format={name!r} was given: it is one of {known}."
        raise OptionError(message)
    chosen = StateFormat(name)
    if chosen in {StateFormat.BF16, StateFormat.INT8} and amsgrad:
        message = (
            f"state_format={name!r} was given with amsgrad=True: it has no running maximum. Use"
            ' "split" or "fp32".'
        )
        raise OptionError(message)
    return chosen


def directories(directory: DirectoryOption, keyword: str = "dir") -> tuple[Path, ...]:
    """Return one path or several as a tuple; empty for None."""
    if directory is None:
        return ()
    given = [directory] if isinstance(directory, str | os.PathLike) else list(directory)
    if not given:
        message = f"{keyword}= is an empty list: name at least one directory, or leave it out."
        raise OptionError(message)
    if any(os.fspath(d) == "" for d in given):
        message = f'{keyword}="" was given: name a directory ("." for this one), or leave it out.'
        raise OptionError(message)
    return tuple(Path(d).expanduser() for d in given)


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def with_own_flags(
    saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return saved groups with the flags of ``own`` that choose among torch's implementations.

    ``foreach``, ``fused``, ``capturable`` and ``differentiable`` select an implementation in the
    saving process and change no result, so a checkpoint does not set them.
    """
    groups = []
    for index, group in enumerate(saved):
        mine = own[index] if index < len(own) else {}  # torch refuses another number of groups
        kept = {k: v for k, v in group.items() if k not in _IMPLEMENTATION}
        groups.append({**kept, **{k: mine[k] for k in _IMPLEMENTATION if k in mine}})
    return groups


def _fraction(states: object) -> float:
    if isinstance(states, str) and states in _FRACTIONS:
        return _FRACTIONS[states]
    if isinstance(states, str) or not _is_fraction(states):
        message = (
            f'states={states!r} was given: use "host" (or "ram"), "disk", or the fraction on disk,'
            " a number between 0 and 1."
        )
        raise OptionError(message)
    return float(states)


def fraction_of(value: object, keyword: str) -> float:
    """Return the fraction of the states that ``keyword`` puts on disk."""
    if not _is_fraction(value):
        message = f"{keyword}={value!r} was given: it is a number between 0 and 1."
        raise OptionError(message)
    return float(value)


def _is_fraction(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        return False
    return 0.0 <= float(value) <= 1.0
