"""The values of ``overlap=``, ``accumulation_steps=`` and ``update_on=``, and their meaning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard

from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.base.fields import check_fields, read_value, whole_number
from tensorstow.base.keywords import names_keywords

Overlap = Literal["none", "forward", "backward", "speculative"]
"""What updates run during: nothing, the next forward, or the backward that makes gradients."""
OverlapOption = Literal["auto", "none", "forward", "backward", "speculative"]
"""``Overlap``, or "auto": "forward" where that is exact and not slower, else "none"."""


def is_auto(overlap: object, keyword: str = "overlap") -> bool:
    """Return whether ``overlap=`` leaves the choice to the optimizer, or to a plan.

    False for another ``keyword``.
    """
    return (keyword, overlap) == ("overlap", "auto")


def meant(overlap: OverlapOption, by_auto: Overlap) -> Overlap:
    """Return the overlap that a plan's means, where "auto" means ``by_auto``."""
    return by_auto if overlap == "auto" else overlap


@names_keywords
@dataclass(frozen=True, slots=True)
class DelayedUpdate:
    """``overlap=`` of updates that run during the next forward and backward, which miss them.

    This is inexact: the results are those of another algorithm. Nothing chooses it but you. Source:
    Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021, section 5.2.

    ``step()`` applies the update of the previous step and starts that of its own gradients. The
    first use of the weights after it decides: a forward of ``module=`` with gradients leaves the
    update pending; any other use (evaluation, ``state_dict()``, ``p.norm()``, an average) applies
    it. In a forward or backward such calls raise OptionError. So code that reads weights after
    every step delays nothing, and a warning is logged.

    A step that commits is exact, so a resumed run has the bits of one that was not interrupted and
    made the same commits. With ``dir=`` set ``commit_every`` to a number of steps; a time raises
    an error, because a clock would decide the results.

    It takes one more copy of the weights in host memory and the gradients of two steps. It works
    with ``AdamW`` and ``Adam``, but not with sharded parameters, ``stow()`` or
    ``update_on="device"``.

    Args:
        warmup_steps: How many steps at the start are exact. Default: 40, as in the paper.

    Raises:
        OptionError: ``warmup_steps`` is no number of steps.
    """

    warmup_steps: Annotated[int, whole_number(0)] = 40

    def __post_init__(self) -> None:
        check_fields(self)


def refuse_delayed(
    overlap: object, context: str, advice: str = 'Use overlap="forward", which is exact.'
) -> None:
    """Raise OptionError, which ends with ``advice``, if ``overlap`` delays updates."""
    if isinstance(overlap, DelayedUpdate):
        message = (
            f"overlap={overlap} was given {context}: tensorstow.AdamW and Adam delay updates of"
            f" parameters that are neither sharded nor placed by a plan. {advice}"
        )
        raise OptionError(message)


AccumulationSteps = int | Callable[[], bool]
"""Backward passes per step, or whether the one under way is the last of its step."""
UpdateOn = Literal["host", "device", "hybrid", "auto"] | float
"""A number: "hybrid" whose device updates this share of the states."""
_WORDS = ("host", "device", "hybrid", "auto")
_CHOICES = '"host", "device", "hybrid", "auto", or the share that the device updates, in (0, 1)'


def is_update_on(value: object) -> TypeGuard[UpdateOn]:
    """Return whether ``value`` is a valid ``update_on``."""
    if isinstance(value, float):
        return 0.0 < value < 1.0
    return isinstance(value, str) and value in _WORDS


def read_update_on(value: object, name: str) -> UpdateOn:
    """Return a valid ``update_on``; raise OptionError for another value, called ``name``."""
    if not is_update_on(value):
        message = f"{name}={abbreviated(value)} was given: it is {_CHOICES}."
        raise OptionError(message)
    return value


def reaches_device(update_on: UpdateOn | None) -> bool:
    """Return whether updates may run on the accelerator, so that all parameters must be there."""
    return update_on not in {None, "host"}


def reaches_host(update_on: UpdateOn | None) -> bool:
    """Return whether updates may run on the host."""
    return update_on != "device"


def keyword_of(update_on: UpdateOn | None) -> str:
    """Return the keyword as users write it."""
    return f'update_on="{update_on}"' if isinstance(update_on, str) else f"update_on={update_on}"


@dataclass(frozen=True, slots=True)
class UpdateTiming:
    """When the updates of a step run. Behaviour depends on this, never on the user's word."""

    keyword: str
    """``overlap=`` as users write it."""
    in_forward: bool = False
    """Whether updates run during the next forward: ``step()`` returns before weights are new."""
    in_backward: bool = False
    """Whether updates run during a backward, which moves them on."""
    can_undo: bool = False
    """Whether updates of backward are undone where the gradients are clipped."""

    @property
    def is_overlapped(self) -> bool:
        """Whether updates run outside of ``step()``, next to other work of the host."""
        return self.in_forward or self.in_backward

    @property
    def begins_early(self) -> bool:
        """Whether an update uses its gradient before the norm and scale of all are known."""
        return self.in_backward and not self.in_forward

    @property
    def allows_clipping(self) -> bool:
        """Whether gradients may be clipped after backward."""
        return self.can_undo or not self.begins_early

    @property
    def waits_by_module(self) -> bool:
        """Whether the next forward waits, module by module, until weights are new."""
        return self.in_forward and not self.in_backward


IN_STEP = UpdateTiming('overlap="none"')
_TIMINGS: Mapping[OverlapOption, UpdateTiming] = {
    "auto": UpdateTiming('the default overlap="auto"'),  # until the optimizer has chosen
    "none": IN_STEP,
    "forward": UpdateTiming('overlap="forward"', in_forward=True),
    "backward": UpdateTiming('overlap="backward"', in_backward=True),
    "speculative": UpdateTiming('overlap="speculative"', in_backward=True, can_undo=True),
}


def refuse_undo(obstacles: Mapping[str, bool]) -> None:
    """Raise OptionError for what ``overlap="speculative"`` cannot be used with.

    ``obstacles``: whether each is there, by its name.
    """
    present = " and ".join(name for name, is_present in obstacles.items() if is_present)
    if present:
        message = (
            f'overlap="speculative" was given with {present}: an update is undone from a second'
            " copy of its states on disk, by the host. Use"
            ' overlap="forward", which is exact under clipping too.'
        )
        raise OptionError(message)


def timing_of(overlap: object) -> UpdateTiming:
    """Return the timing that a user's ``overlap=`` means; raises OptionError if it means none."""
    value: Any = read_value(OverlapOption | DelayedUpdate, overlap, "overlap")
    if isinstance(value, DelayedUpdate):
        return UpdateTiming(f"overlap={value}", in_forward=True, in_backward=True)
    return _TIMINGS[value]
