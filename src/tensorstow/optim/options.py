"""Reads and checks an optimizer's keywords, and the keys of its parameter groups."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
import torch.distributed as dist

from tensorstow.base.directories import Paths, read_paths
from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.base.fields import number_of, read_value
from tensorstow.base.signals import StopSignals, read_stop_signals
from tensorstow.base.sizes import parse_size
from tensorstow.base.update_on import (
    AccumulationSteps,
    DelayedUpdate,
    OverlapOption,
    UpdateOn,
    is_auto,
    keyword_of,
    reaches_device,
    refuse_undo,
)
from tensorstow.checkpoint.run import Checkpoints, Extra, Interval, RunOptions
from tensorstow.formats.state_format import StateFormat
from tensorstow.io import device_link
from tensorstow.states.layout import DEFAULT_RING_BYTES
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement
from tensorstow.step.deferred_rows import refuse_without_rows
from tensorstow.step.validation import refuse_beside
from tensorstow.tensors.dtensor import is_in_storage, layout_of

logger = logging.getLogger("tensorstow")
_has_plan: ContextVar[bool] = ContextVar("has_plan", default=False)
"""Whether a plan that places the optimizer's parameters has chosen their overlap."""
_STATE_BYTES = 8
"""Bytes of both moments of an element, about."""
StatePlacement = Literal["host", "ram", "cpu", "disk", "nvme"] | float
_NUMBERS = (int, float, np.integer, np.floating)
_FRACTIONS = {"host": 0.0, "ram": 0.0, "cpu": 0.0, "disk": 1.0, "nvme": 1.0}
Durability = Literal["commit", "none"] | None
DirectoryOption = Paths | None


def placement(
    states: StatePlacement,
    directory: DirectoryOption,
    ram_budget: str | int | None,
    durability: Durability = "none",
) -> Placement:
    """Read ``states=``, ``dir=``, ``ram_budget=`` and ``durability=``.

    Raises OptionError for what makes no sense.
    """
    read_value(Durability, durability, "durability")
    fraction = _fraction(states)
    durable = durability == "commit" or (durability is None and directory is not None)
    if durable and directory is None:
        message = (
            'durability="commit" was requested without dir=: pass the directory from which to'
            " resume the run."
        )
        raise OptionError(message)
    if fraction == 0.0 and not durable and (directory is not None or ram_budget is not None):
        name = "dir" if directory is not None else "ram_budget"
        message = (
            f"{name}= was given with states={states!r}, which puts nothing on disk. Leave {name}"
            ' out, or use states="disk" or a fraction.'
        )
        raise OptionError(message)
    budget = None if ram_budget is None else parse_size(ram_budget, "ram_budget")
    return Placement(fraction, read_paths(directory, "dir"), budget, durable)


def offload_policy(
    state_placement: Placement,
    *,
    policy: PipelinePolicy | None,
    overlap: OverlapOption | DelayedUpdate,
    state_format: str | None,
    amsgrad: bool,
    update_on: UpdateOn | None,
) -> OffloadPolicy:
    """Return the policy that the keywords about place, format and updates of states make."""
    chosen = OffloadPolicy(
        state_placement,
        PipelinePolicy() if policy is None else policy,
        overlap,
        _state_format(state_format, amsgrad=amsgrad),
        update_on,
    )
    if chosen.timing.can_undo:
        refuse_undo(
            {
                "all states in host memory": state_placement.disk_fraction == 0,
                keyword_of(update_on): reaches_device(update_on),
            }
        )
    if reaches_device(update_on):
        refuse_beside(chosen.timing, f"{keyword_of(update_on)} was requested")
    return chosen


def run_options(
    module: torch.nn.Module | None,
    *,
    accumulation_steps: AccumulationSteps,
    commit_every: str | int | None,
    extra: Callable[[], Extra] | None,
    stop_signals: StopSignals = None,
    checkpoints: Checkpoints = "full",
    durable: bool = True,
    defer_untouched: bool = False,
) -> RunOptions:
    """Return the options of keywords about a durable run; raise OptionError for bad values."""
    read_value(Checkpoints, checkpoints, "checkpoints")
    read_value(AccumulationSteps, accumulation_steps, "accumulation_steps")
    if checkpoints == "reference" and not durable:
        message = (
            'checkpoints="reference" was given, and the states are scratch: it would name files'
            " that end with the process. Pass the run's directory as dir=, and leave durability"
            " out."
        )
        raise OptionError(message)
    statuses = {} if stop_signals is None else read_stop_signals(stop_signals)
    if statuses and (checkpoints == "reference" or not durable):
        message = (
            f"stop_signals={stop_signals!r} was given, and there is nothing to commit to: pass the"
            " run's directory as dir=."
            if not durable
            else f'stop_signals={stop_signals!r} was given with checkpoints="reference": the'
            " trainer's own checkpoint would lack the step. Let the trainer save at a signal, by a"
            " callback: StopCallback of tensorstow.integrations.transformers, StopCheckpoint of"
            " tensorstow.integrations.lightning."
        )
        raise OptionError(message)
    given_module: object = module
    if not isinstance(given_module, torch.nn.Module | None):
        message = f"module={abbreviated(module)} was given: pass the model, a torch.nn.Module."
        raise OptionError(message)
    given_extra: object = extra
    if given_extra is not None and not callable(given_extra):
        message = (
            f"extra={abbreviated(extra)} was given: pass a function that returns a dict; it is"
            " called at the end of each step."
        )
        raise OptionError(message)
    return RunOptions(
        module=module,
        accumulation_steps=accumulation_steps,
        commit_every=Interval.parse(commit_every),
        extra=extra,
        stop_signals=statuses,
        checkpoints=checkpoints,
        defers_rows=read_value(bool, defer_untouched, "defer_untouched"),
    )


def settled(
    offload_policy: OffloadPolicy, run: RunOptions, parameters: Sequence[torch.Tensor]
) -> OffloadPolicy:
    """Return the policy with what ``overlap="auto"`` means for trained ``parameters``; log it."""
    if not is_auto(offload_policy.overlap):
        return offload_policy
    why = next((why for why, is_so in _in_step(offload_policy, run, parameters) if is_so), "")
    if offload_policy.placement.disk_fraction > 0:
        logger.info('overlap="auto" means "%s"%s', "none" if why else "forward", why)
    return replace(offload_policy, overlap="none" if why else "forward", is_overlap_chosen=True)


@contextmanager
def without_auto_overlap() -> Iterator[None]:
    """Let ``overlap="auto"`` mean "none" in the block: a plan has said what is to be."""
    token = _has_plan.set(True)
    try:
        yield
    finally:
        _has_plan.reset(token)


def _in_step(
    offload_policy: OffloadPolicy, run: RunOptions, parameters: Sequence[torch.Tensor]
) -> Iterator[tuple[str, bool]]:
    """Yield why updates would run in ``step()``, and whether it is so."""
    placement, update_on = offload_policy.placement, offload_policy.update_on
    yield ": all states are in memory", placement.disk_fraction == 0
    yield ": the plan has none", _has_plan.get()
    yield ": without module= nothing waits for new weights", run.module is None
    moved = placement.disk_fraction * _STATE_BYTES * sum(p.numel() for p in parameters)
    moved -= max(0, (placement.ram_budget or 0) - DEFAULT_RING_BYTES)
    # A ring there and back reads less than one that follows forward: by up to its own size.
    yield ": the ring holds half of the states", moved <= 2 * DEFAULT_RING_BYTES
    yield f": {keyword_of(update_on)} was given", reaches_device(update_on)
    yield ": defer_untouched=True was given", run.defers_rows
    has_group = dist.is_available() and dist.is_initialized()
    yield ": there are several processes", has_group and dist.get_world_size() > 1
    yield ": weights are on an accelerator", any(map(device_link.is_remote, parameters))
    placed = any(layout_of(p) is not None or is_in_storage(p) for p in parameters)
    yield ": weights are sharded, or a plan places them", placed
    compiled = getattr(run.module, "_compiled_call_impl", None) is not None
    compiled = compiled or hasattr(run.module, "_orig_mod")
    yield ": the module is compiled as one graph", compiled


def check_deferred(offload_policy: OffloadPolicy, run: RunOptions) -> None:
    """Raise OptionError if updates of rows are to be deferred, and none can be."""
    if run.defers_rows:
        timing, fraction = offload_policy.timing, offload_policy.placement.disk_fraction
        refuse_without_rows(run.module, timing, moves=fraction > 0)


def check_delayed(offload_policy: OffloadPolicy, run: RunOptions) -> None:
    """Raise OptionError for options that contradict ``DelayedUpdate``, if it is used."""
    overlap = offload_policy.overlap
    if not isinstance(overlap, DelayedUpdate):
        return
    if offload_policy.placement.durable and run.commit_every.seconds is not None:
        message = (
            f"overlap={overlap} was given with dir= and a commit every"
            f" {run.commit_every.seconds:g} seconds: a commit applies the delayed update, so a"
            " clock would decide the results. Use commit_every= with a number of steps, or None."
        )
        raise OptionError(message)
    if offload_policy.policy.nan_until_published:
        message = (
            f"overlap={overlap} was given with nan_until_published=True: the next forward and"
            " backward compute with the old weights, which must not be NaN. Leave it out."
        )
        raise OptionError(message)


def _state_format(name: str | None, *, amsgrad: bool) -> StateFormat | None:
    if read_value(str | None, name, "state_format") is None:
        return None
    if name not in set(StateFormat):
        formats = ", ".join(f'"{f.value}"' for f in StateFormat)
        message = f"state_format={name!r} was given: it must be one of {formats}."
        raise OptionError(message)
    chosen = StateFormat(name)
    if chosen in {StateFormat.BF16, StateFormat.INT8} and amsgrad:
        message = (
            f"state_format={name!r} was given with amsgrad=True: it cannot hold the running"
            ' maximum. Use "split" or "fp32".'
        )
        raise OptionError(message)
    return chosen


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def check_state_dict(state_dict: object) -> None:
    """Raise OptionError unless ``state_dict`` has the parts of an optimizer's state dict."""
    parts = state_dict if isinstance(state_dict, dict) else {}
    groups: Any = parts.get("param_groups")
    if not _are_groups(groups) or not _are_states(parts.get("state"), groups):
        kind = type(state_dict).__name__
        form = f"one with the keys {sorted(map(str, parts))}" if parts else kind
        message = (
            f"load_state_dict() was called with {form}: a state dict has state, a dict of dicts,"
            " and param_groups, a list of dicts. If it is from a file, the file is damaged, or"
            " holds something else."
        )
        raise OptionError(message)


def with_own_flags(
    saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return saved groups with the flags of ``current`` that choose torch's implementation.

    ``foreach``, ``fused``, ``capturable`` and ``differentiable`` select an implementation in the
    saving process and change no result, so a checkpoint does not set them.
    """
    groups = []
    for index, group in enumerate(saved):
        # If there are more saved groups than current ones, torch raises an error later.
        mine = current[index] if index < len(current) else {}
        hyper = {k: v for k, v in group.items() if k not in _IMPLEMENTATION}
        groups.append({**hyper, **{k: mine[k] for k in _IMPLEMENTATION if k in mine}})
    return groups


def _are_groups(groups: object) -> bool:
    return isinstance(groups, Sequence) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups
    )


def _are_states(states: object, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the entries of the parameters of ``groups`` are dicts."""
    numbers = {n for group in groups for n in group["params"] if isinstance(n, int)}
    return isinstance(states, Mapping) and all(
        isinstance(entry, Mapping) for key, entry in states.items() if key in numbers
    )


def _fraction(states: object) -> float:
    if isinstance(states, str) and states in _FRACTIONS:
        return _FRACTIONS[states]
    if isinstance(states, str) or not _is_fraction(states):
        message = (
            f'states={abbreviated(states)} was given: use "host" (or "cpu", "ram"), "disk" (or'
            ' "nvme"), or the fraction on disk, a number between 0 and 1.'
        )
        raise OptionError(message)
    return float(states)


def fraction_of(value: object, keyword: str) -> float:
    """Return the fraction of the states that ``keyword`` puts on disk."""
    if not _is_fraction(value):
        message = f"{keyword}={abbreviated(value)} was given: it must be between 0 and 1."
        raise OptionError(message)
    return float(value)


def _is_fraction(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        return False
    number = number_of(value)
    return number is not None and 0.0 <= number <= 1.0


# --- keys of parameter groups: a misspelled one would have no effect ---

_LIKE = 0.85
"""Similarity above which an unknown key is a typo: "weight_decya" is one, "lr_scale" is not."""
_OTHERS = ("params", "param_names", "initial_lr", "bias_correction", "ema")
_OF_ALL = frozenset(
    {
        "accumulation_steps",
        "checkpoints",
        "commit_every",
        "durability",
        "grad_dtype",
        "overlap",
        "ram_budget",
        "state_format",
        "states",
        "stop_signals",
        "update_on",
    }
)
"""Options of a whole optimizer, not of a group."""


def check_keys(group: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raise OptionError for a misspelled one of ``keys``, or an option of whole optimizers.

    Users keep keys of their own in groups, so a name that is unlike all of ours is accepted.
    """
    taken = {*keys, *_OTHERS}
    for key in group:
        if key in taken:
            continue
        if key in _OF_ALL:
            message = (
                f"{key}={group[key]!r} was given in a parameter group: it is an option of the"
                f" whole optimizer, AdamW(groups, {key}=...). Remove it from the group."
            )
            raise OptionError(message)
        near = get_close_matches(key, taken, 1, _LIKE)
        if near:
            message = (
                f"A parameter group has {key}={group[key]!r}, which nothing reads: did you mean"
                f" {near[0]!r}? A key of your own needs a name that is less similar."
            )
            raise OptionError(message)
