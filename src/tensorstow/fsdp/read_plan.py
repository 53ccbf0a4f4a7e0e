"""The plan of a model that is only read: what it may say, and which one a budget leads to."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields

from tensorstow.base import notices
from tensorstow.base.budget import Budget
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import Bytes, format_bytes, format_count
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.automatic import machine_budget
from tensorstow.fsdp.read_sources import ReadOptions
from tensorstow.fsdp.read_units import ReadUnit
from tensorstow.fsdp.sharding import rank_here
from tensorstow.fsdp.units import ROOT
from tensorstow.fsdp.validation import validate_units
from tensorstow.planner.resident import UnitBytes, choose_resident, passing_bytes

logger = logging.getLogger("tensorstow")

_OF_READING = frozenset({"parameters", "parameter_units", "prefetch", "weight_ram_budget"})
"""The fields of a plan that apply to a read-only model; the others are for training."""


def validate_read_plan(
    plan: Plan, units: Sequence[ReadUnit], readable: Mapping[str, UnitBytes], options: ReadOptions
) -> None:
    """Check that the units of a plan exist, and that those on disk are among the ``readable``."""
    validate_units(plan, [*(unit.name for unit in units), ROOT])
    default = Plan()
    trained = [field.name for field in fields(Plan) if field.name not in _OF_READING]
    idle = [name for name in trained if getattr(plan, name) != getattr(default, name)]
    if idle:
        message = (
            f"{idle[0]}={getattr(plan, idle[0])!r} was given in a plan of a model that is only"
            " read: it is for training. Leave it out."
        )
        raise OptionError(message)
    on_disk = [unit.name for unit in units if unit.tier_in(plan) == Tier.DISK]
    if on_disk and options.weights is None:
        message = (
            f"Unit {on_disk[0]!r} is to be on disk, where a model that is only read has the files"
            " that its weights come from: pass weights=."
        )
        raise OptionError(message)
    unreadable = sorted(set(on_disk) - set(readable))
    if unreadable:
        message = (
            f"Unit {unreadable[0]!r} has parameters that transformers makes of several tensors of"
            " the files, or of changed ones: they cannot be computed with as they are read."
            f' Place the unit in memory: Plan(parameter_units={{{unreadable[0]!r}: "host"}}).'
        )
        raise OptionError(message)


def choose_read_plan(
    units: Sequence[ReadUnit],
    sizes: Mapping[str, UnitBytes],
    readable: Mapping[str, UnitBytes],
    options: ReadOptions,
) -> Plan:
    """Return the plan with as many units in memory as the budget has room for.

    Args:
        units: The model's, in the order of their use.
        sizes: Their bytes on the device that computes, and in its buffers.
        readable: Those that can be read from files: their bytes in host memory, and in buffers.
        options: The budget, and what computes.
    """
    budget = options.budget or machine_budget(units, options.device, ())
    limits = {tier: _limit(budget, tier) for tier in Tier}
    ahead, below = Plan().prefetch, dict(readable)
    on_device: set[str] = set()
    if options.is_away:
        on_device, ahead = choose_resident(sizes, limits[Tier.DEVICE], ahead)
        if len(on_device) == len(units):
            return Plan(parameters=Tier.DEVICE)
        below = {name: size for name, size in readable.items() if name not in on_device}
    limit = limits[Tier.HOST]
    fixed = sum(options.bytes_of(u) for u in units if u.name not in {*on_device, *readable})
    if fixed > limit:
        message = (
            f"{format_bytes(limit)} of host memory were given, and {format_bytes(fixed)} of"
            " weights must fit in it: the model has no weights=, or its parameters are made"
            " of several tensors of the files. Raise the budget."
        )
        raise BudgetError(message)
    resident, ahead = choose_resident(below, limit - fixed, ahead)
    passing = [name for name in below if name not in resident]
    tiers = dict.fromkeys(on_device, Tier.DEVICE)
    counts = [f"{len(on_device)} on the device"] if options.is_away else []
    counts += [
        f"{len(units) - len(on_device) - len(passing)} in host memory",
        f"{len(passing)} on disk",
    ]
    line = f'plan="auto": of {format_count(len(units), "unit")} {", ".join(counts)}'
    logger.info(line)
    if rank_here() == 0:
        notices.show(line)
    if not passing:
        return Plan(parameter_units=tiers, prefetch=ahead)
    stay = [unit.name for unit in units if unit.name not in {*passing, *on_device}]
    nbytes = Bytes(passing_bytes([below[name] for name in passing], ahead))
    return Plan(
        parameters=Tier.DISK,
        parameter_units=tiers | dict.fromkeys(stay, Tier.HOST),
        prefetch=ahead,
        weight_ram_budget=nbytes,
    )


def _limit(budget: Budget, tier: Tier) -> int:
    limit = budget.bytes_of(tier)
    return sys.maxsize if limit is None else limit
