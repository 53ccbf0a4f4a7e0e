"""``deepspeed.zero.register_external_parameter``: parameters that modules use without owning them.

A unit's weights are whole while its block runs. A weight that a module outside of the block uses
belongs to the root's unit instead, with all of its block's: these stay whole from the first use in
forward to the end of backward.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.registry import owner_of
from tensorstow.fsdp.units import ROOT, units_of

_USERS: Any = WeakIdKeyDictionary()
"""Weak sets of modules, by the parameter that they use."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that a module uses a parameter that another module owns, before ``initialize``.

    It is needed in stage 3 where the module is outside of the owner's block.

    Args:
        module: The module that uses it in forward.
        parameter: The parameter.

    Raises:
        OptionError: It is not a parameter, or ``initialize`` has placed it already.
    """
    _check(parameter)
    if owner_of(parameter) is not None:
        message = (
            "register_external_parameter() was called for a parameter of an engine: which weights"
            " are gathered together is decided by initialize(). Call it before."
        )
        raise OptionError(message)
    _USERS.setdefault(parameter, weakref.WeakSet()).add(module)


@contextmanager
def uses_outside_of_blocks_named() -> Iterator[None]:
    """Let a forward that uses a sharded weight raise an error that names the missing call.

    Raises:
        OptionError: It does.
    """
    try:
        yield
    except RuntimeError as error:
        if "got mixed torch.Tensor and DTensor" not in str(error):
            raise
        message = (
            "A weight was used outside of the forward of its block, where a rank has a shard of it"
            " (stage 3): the block's attribute was read, or another method of it called. Before"
            " initialize() call zero.register_external_parameter(model, weight) with one such"
            " weight of each of these blocks; or call the block itself."
        )
        raise OptionError(message) from error


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo ``register_external_parameter``, before ``initialize``.

    Args:
        module: The module that used it.
        parameter: The parameter.

    Raises:
        OptionError: It is not a parameter, or not registered for the module.
    """
    _check(parameter)
    if module not in _USERS.get(parameter, ()):
        message = (
            "unregister_external_parameter() was called for a parameter that was not registered"
            " for this module. Leave it out."
        )
        raise OptionError(message)
    _USERS[parameter].discard(module)


def blocks_to_gather(model: nn.Module) -> list[nn.Module] | None:
    """Return the blocks that are units, without those whose weights others use; None: all."""
    units = [unit for unit in units_of(model) if unit.name != ROOT]
    alone = []
    for unit in units:
        inside = set(unit.module.modules())
        users = {m for p in unit.parameters.values() for m in _USERS.get(p, ())}
        if users <= inside:
            alone.append(unit.module)
    return None if len(alone) == len(units) else alone


def _check(parameter: object) -> None:
    if not isinstance(parameter, nn.Parameter):
        message = f"A {type(parameter).__name__} was given: it is to be a torch.nn.Parameter."
        raise OptionError(message)
