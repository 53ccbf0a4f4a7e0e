"""Checks that one optimizer updates a parameter, and that ``stow`` has not replaced it.

[Note: One optimizer] Two optimizers over one parameter each keep their own states, which are wrong
after the other's update. An optimizer of ours counts from its first step, or from the ``stow()``
that made it, until it is closed, dropped, or has failed. Optimizers of torch must not update
parameters that ``stow()`` placed: the one that it returned does. An optimizer that was made before
``stow()`` has the old parameters, which get no gradients: torch would take empty steps. A global
hook, which torch calls before each step, checks both. A wrapper shares the groups of
the optimizer that it wraps.
"""

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import format_count
from tensorstow.checkpoint.ranks import refuse_unjoined
from tensorstow.tensors.shares import share_of


@dataclass(slots=True)
class _Steps:
    """Whether an optimizer of ours updates its parameters."""

    is_alive: weakref.WeakMethod[Callable[[], bool]]
    """Method that returns whether the optimizer can take a step."""
    has_begun: bool = False
    has_met: bool = False
    """Whether its ranks had met when it took a step."""
    is_placed: bool = False
    """Whether ``stow`` returned it."""

    def counts(self) -> bool:
        """Return whether the optimizer has taken steps and may take another."""
        is_alive = self.is_alive()
        return self.has_begun and is_alive is not None and is_alive()


_OURS: "weakref.WeakKeyDictionary[Optimizer, _Steps]" = weakref.WeakKeyDictionary()
_REPLACED: Any = WeakIdKeyDictionary()
"""The names of parameters that ``stow`` has replaced, while an optimizer still has them."""
_BEGUN: list[None] = []
"""As many as optimizers of ours have begun to count."""
_WATCHES: list[Any] = []
"""The handle of the hook, from the first ``stow`` on."""
os.register_at_fork(after_in_child=_OURS.clear)  # none of them works in a forked child


def register(optimizer: Optimizer, is_alive: Callable[[], bool]) -> None:
    """Register a new optimizer of ours, which can take a step while ``is_alive``, a method."""
    # The table must not keep the object alive whose method this is.
    _OURS[optimizer] = _Steps(weakref.WeakMethod(is_alive))


def begin(optimizer: Optimizer) -> None:
    """Record that an optimizer of ours updates its parameters from now on.

    Raises OptionError if another optimizer of ours updates one of them, or if this is one of
    several ranks that have not met.
    """
    registered = _OURS.get(optimizer)
    if registered is None:  # registered in the parent of this forked process
        return
    if not registered.has_met:
        refuse_unjoined("step() was called")
        registered.has_met = True
    if len(_OURS) > 1:
        _refuse_other(optimizer, lambda steps: steps is not registered)
    if not registered.has_begun:
        registered.has_begun = True
        _BEGUN.append(None)
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        shares = [share for p in parameters if (share := share_of(p)) is not None]
        for reference in dict.fromkeys(share.follow for share in shares):
            follow = reference()
            if follow is not None:
                follow(optimizer)


def begun() -> int:
    """Return how many optimizers of ours have begun to count so far."""
    return len(_BEGUN)


def note_placed(optimizer: Optimizer) -> None:
    """Record the optimizer that ``stow`` made as the one that updates the model."""
    steps = _OURS[optimizer]
    steps.has_begun = steps.is_placed = True  # it counts before its first step
    _BEGUN.append(None)
    if not _WATCHES:
        _WATCHES.append(register_optimizer_step_pre_hook(_refuse_step))


def note_replaced(name: str, parameter: torch.Tensor) -> None:
    """Record a parameter that the model had, and that ``stow`` replaces."""
    _REPLACED[parameter] = name


def _refuse_other(optimizer: Optimizer, may_be: Callable[[_Steps], bool]) -> None:
    conflict = _other_than(optimizer, may_be)
    if conflict is not None:
        del conflict
        gc.collect()  # it may be garbage in a reference cycle
        conflict = _other_than(optimizer, may_be)
    if conflict is None:
        return
    other, count = conflict
    origin = " that stow() returned" if _OURS[other].is_placed else ""
    message = (
        f"{type(optimizer).__name__} was to step {format_count(count, 'parameter')}, which another"
        f" optimizer updates: the {type(other).__name__}{origin}. Each keeps states of its own,"
        " which are wrong after an update by the other. Step that one alone, or close() it first."
    )
    raise OptionError(message)


def _other_than(
    optimizer: Optimizer, may_be: Callable[[_Steps], bool]
) -> tuple[Optimizer, int] | None:
    """Return another optimizer of ours that shares parameters, and their number."""
    parameter_ids, groups = _ids(optimizer), {id(group) for group in optimizer.param_groups}
    for other, steps in list(_OURS.items()):
        if may_be(steps) and steps.counts():
            shared = parameter_ids & _ids(other)
            is_wrapped = any(id(group) in groups for group in other.param_groups)
            if shared and not is_wrapped:
                return other, len(shared)
    return None


def _ids(optimizer: Optimizer) -> set[int]:
    groups = optimizer.param_groups
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # the subclass would wait for updates
        return {id(p) for group in groups for p in group["params"] if p.requires_grad}


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001  # as for torch's own
def _refuse_step(optimizer: Optimizer, *_: object) -> None:
    """Raise OptionError if another optimizer updates the parameters, or ``stow`` replaced them."""
    if len(_REPLACED):
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        names = [_REPLACED[p] for p in parameters if p in _REPLACED]
        if names:
            message = (
                f"{type(optimizer).__name__} was to step {format_count(len(names), 'parameter')}"
                f" ({names[0]} ...) that stow() has replaced since it was made: it would update"
                " nothing of the model. Step the optimizer that stow() returned."
            )
            raise OptionError(message)
    if optimizer not in _OURS:
        _refuse_other(optimizer, lambda steps: steps.is_placed)
