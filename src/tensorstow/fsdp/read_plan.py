"""The plan of a model that is only read: what it may say, and which one a budget leads to."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields

from tensorstow.base.budget import Budget
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_bytes
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.automatic import machine_budget
from tensorstow.fsdp.read_sources import ReadOptions
from tensorstow.fsdp.read_units import ReadUnit
from tensorstow.fsdp.units import ROOT
from tensorstow.planner.resident import UnitBytes, choose_resident, passing_bytes

logger = logging.getLogger("tensorstow")

_OF_READING = frozenset({"parameters", "units", "prefetch", "buffer_pool_bytes"})
"""The fields of a plan that a model has that is only read; the others are for training."""


def validate_read_plan(
    plan: Plan, units: Sequence[ReadUnit], readable: Mapping[str, UnitBytes], options: ReadOptions
) -> None:
    """Check that a plan names units there are, and that those on disk can be read there.

    Args:
        plan: The plan.
        units: The model's.
        readable: Units that can be read from files.
        options: What the user said.

    Raises:
        OptionError: The plan cannot be used.
    """
    names = [unit.name for unit in units]
    unknown = sorted(set(plan.units) - {*names, ROOT})
    if unknown:
        message = f"The plan names units that the model does not have ({unknown}): it has {names}."
        raise OptionError(message)
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
            f"Unit {on_disk[0]!r} is to be on disk, and a model that is only read has there the"
            " files that its weights come from: pass weights=."
        )
        raise OptionError(message)
    made = sorted(set(on_disk) - set(readable))
    if made:
        message = (
            f"Unit {made[0]!r} has parameters that transformers makes of several tensors of the"
            f" files, or of changed ones: they cannot be computed with as they are read."
            f' Place the unit in memory: Plan(units={{{made[0]!r}: "host"}}).'
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
        sizes: Their bytes where they are computed with, and in buffers there.
        readable: Those that can be read from files: their bytes in host memory, and in buffers.
        options: The budget, and what computes.

    Raises:
        BudgetError: It has no room for the buffers, or for units that cannot be read from files.
    """
    budget = options.budget or machine_budget([u.unit for u in units], options.device, None)
    limits = {tier: _limit(budget, tier) for tier in Tier}
    ahead, below = Plan().prefetch, dict(readable)
    there: set[str] = set()
    if options.is_away:
        there, ahead = choose_resident(sizes, limits[Tier.DEVICE], ahead)
        if len(there) == len(units):
            return Plan(parameters=Tier.DEVICE)
        below = {name: each for name, each in readable.items() if name not in there}
    limit = limits[Tier.HOST]
    fixed = sum(options.bytes_of(u) for u in units if u.name not in {*there, *readable})
    if fixed > limit:
        message = (
            f"{format_bytes(limit)} of host memory were given, and {format_bytes(fixed)} of"
            " weights have to be there: the model has no weights=, or its parameters are made"
            " of several tensors of the files. Raise the budget."
        )
        raise BudgetError(message)
    resident, ahead = choose_resident(below, limit - fixed, ahead)
    passing = [name for name in below if name not in resident]
    tiers = dict.fromkeys(there, Tier.DEVICE)
    counts = [f"{len(there)} on the device"] if options.is_away else []
    counts += [
        f"{len(units) - len(there) - len(passing)} in host memory",
        f"{len(passing)} on disk",
    ]
    logger.info('plan="auto": of %d units %s', len(units), ", ".join(counts))
    if not passing:
        return Plan(units=tiers, prefetch=ahead)
    stay = [unit.name for unit in units if unit.name not in {*passing, *there}]
    nbytes = passing_bytes([below[name] for name in passing], ahead)
    return Plan(
        parameters=Tier.DISK,
        units=tiers | dict.fromkeys(stay, Tier.HOST),
        prefetch=ahead,
        buffer_pool_bytes=nbytes,
    )


def _limit(budget: Budget, tier: Tier) -> int:
    limit = budget.bytes_of(tier)
    return sys.maxsize if limit is None else limit
