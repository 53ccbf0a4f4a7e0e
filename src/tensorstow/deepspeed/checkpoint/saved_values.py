"""Checks of the values in a checkpoint, before anything of an engine is changed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Annotated, Any

import torch

from tensorstow.base.errors import OptionError, StoreFormatError, abbreviated
from tensorstow.base.fields import read_value, whole_number
from tensorstow.deepspeed.loss_scale import LossScale, read_scale
from tensorstow.doorkit.checkpoint_checks import reading
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.layout import OptionalStates
from tensorstow.step.validation import check_group, check_saved, check_step, refuse_unheld

_LAST = "last_batch_iteration"
"""What DeepSpeed's schedules save."""
_NOT_OPTIONS = frozenset({"params", "param_names"})


@contextmanager
def checking(path: Path) -> Iterator[None]:
    """Raise StoreFormatError, which names ``path``, for a value in it that the block refuses."""
    try:
        with reading(path):
            yield
    except OptionError as error:
        message = f"{path} was to be loaded, and it is damaged: {error} Load another checkpoint."
        raise StoreFormatError(message) from error


def counts_in(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """Return the counters ``names``; raise OptionError for one that is no whole number."""
    return {n: read_value(Annotated[int, whole_number(0)], values[n], n) for n in names}


def options_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a saved group, without its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def check_options(optimizer: PlacedOptimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptionError for options of saved groups that ``optimizer`` cannot step with."""
    for group, theirs in zip(optimizer.param_groups, saved, strict=True):
        expected, loaded = options_in(group), options_in(theirs)
        _refuse_other_kinds(expected, loaded)
        refuse_unheld(loaded)
        if isinstance(optimizer, StowedAdam):
            check_group({**expected, **loaded})


def refuse_other_amsgrad(optimizer: PlacedOptimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptionError for saved groups, which were checked, with another ``amsgrad``."""
    for group, theirs in zip(optimizer.param_groups, saved, strict=True):
        setting = group.get("amsgrad")
        if theirs.get("amsgrad", setting) != setting:
            message = (
                f"amsgrad={theirs['amsgrad']} was saved and the optimizer has {setting}: it decides"
                " which states exist. Create the optimizer with the saved value, or pass"
                " load_optimizer_states=False."
            )
            raise OptionError(message)


def check_scheduler(scheduler: Any, saved: object) -> None:  # of any class
    """Raise OptionError for a saved state that cannot be that of ``scheduler``."""
    state = read_value(dict, saved, "the scheduler's state")
    expected = scheduler.state_dict()
    if _LAST in expected and _LAST not in state:
        message = f"The scheduler's state has no {_LAST!r}."
        raise OptionError(message)
    _refuse_other_kinds(expected, state)


def check_states(
    parameter: torch.Tensor, entry: Mapping[str, Any], name: str, *, amsgrad: bool
) -> None:
    """Raise OptionError unless saved states of Adam's are a parameter's; values are not read."""
    check_step(entry.get("step", 0.0), name)
    if entry.keys() - {"step", "master"} or entry.get("step"):
        check_saved(entry, parameter, name, OptionalStates(amsgrad))
    for key, value in entry.items():
        if key != "step" and value.shape != parameter.shape:
            message = (
                f"The saved {key!r} of {name} is {tuple(value.shape)}, and the parameter is"
                f" {tuple(parameter.shape)}: they are of different models."
            )
            raise OptionError(message)


def check_others(saved: Any, scale: LossScale | None, scheduler: Any) -> None:
    """Raise StoreFormatError for a loss scale or a scheduler's state that cannot be loaded."""
    with checking(saved.path):
        if scale is not None and saved.scale is not None:
            read_scale(saved.scale)
        if scheduler is not None and saved.scheduler is not None:
            check_scheduler(scheduler, saved.scheduler)


def _refuse_other_kinds(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise OptionError where a saved value is no number, and the one it replaces is."""
    for name, value in own.items():
        if name in saved and _is_number(value) and not _is_number(saved[name]):
            message = f"{name}={abbreviated(saved[name])} was saved: it must be a number."
            raise OptionError(message)


def _is_number(value: object) -> bool:
    """Return whether a value is a number, and not NaN."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return isinstance(value, Real) and value == value  # noqa: PLR0124  # NaN is not
