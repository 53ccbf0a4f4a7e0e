"""Tries every placement, keeps those that fit a budget, and picks the fastest by the rates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tensorstow.base.budget import Budget
from tensorstow.base.errors import BudgetError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_bytes
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import Overlap
from tensorstow.planner.placement import Conditions, bytes_of, fit, states_of
from tensorstow.planner.seconds import MachineRates, MicroBatch, StepTime, time_of
from tensorstow.planner.sizes import Sizes
from tensorstow.states.layout import DEFAULT_RING_BYTES

_GAIN = 0.02
"""A plan that is faster than a simpler one by less than this part is not worth it."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was tried."""

    plan: Plan
    short: dict[Tier, int]
    """Bytes that the budget lacks, by tier; empty: it fits."""
    step: StepTime | None = None
    """None: it does not fit, or no rates are known."""


@dataclass(frozen=True, slots=True)
class Found:
    """The plans that were tried, and the one that was chosen."""

    chosen: Alternative
    tried: tuple[Alternative, ...]

    def reason(self, other: Alternative) -> str:
        """Return why another plan was not chosen.

        Args:
            other: One of ``tried``.
        """
        if other.short:
            short = other.short.items()
            return ", ".join(f"{format_bytes(n)} of {tier.upper()} short" for tier, n in short)
        if other.step is None or self.chosen.step is None:
            return "it fits, and holds less than it could"
        if other.plan.overlap == "backward" and self.chosen.plan.overlap != "backward":
            refused = "clipping and loss scaling are refused beside backward"
            return f"{other.step.seconds:.3g} s per step; {refused}: ask for it"
        return f"{other.step.seconds:.3g} s per step"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a search is for."""

    sizes: Sizes
    budget: Budget
    conditions: Conditions
    base: Plan = field(default_factory=Plan)
    """Says what a search leaves as it is: micro-batches, stage, replicas."""
    overlap: Overlap | None = None
    """Where the user says when updates run; None: the search says it."""
    spend: bool = True
    """Whether host memory that the budget leaves may hold states of a plan that has them on disk
    (``Plan.ram_budget``)."""
    batch: MicroBatch | None = None
    machine: MachineRates | None = None
    """None: no rates are known, and the first placement that fits is chosen."""


def search(asked: Asked) -> Found:
    """Return the fastest plan that fits, of those that refuse nothing; without rates the first.

    ``overlap="backward"`` refuses clipping and loss scaling: it is chosen only where nothing else
    fits. Of plans that are as fast, the one that holds most in the highest tiers is first.

    Args:
        asked: The model, the budget and what is known of the machine.

    Raises:
        BudgetError: None fits; it says what is short, and the smallest change that fits.
        OptionError: The profile lacks a rate.
    """
    tried = tuple(_try_all(asked))
    fitting = [each for each in tried if not each.short]
    if not fitting:
        raise BudgetError(_what_is_short(tried, asked.budget))
    free = [each for each in fitting if each.plan.overlap != "backward"] or fitting
    chosen = free[0]
    for each in free[1:]:
        if each.step is None or chosen.step is None:
            continue
        if each.step.seconds < (1 - _GAIN) * chosen.step.seconds:
            chosen = each
    return Found(chosen, tried)


def auto_plan(sizes: Sizes, budget: Budget, conditions: Conditions) -> Plan:
    """Return the first placement that fits a budget.

    Args:
        sizes: The model, as one rank's share.
        budget: Bytes that each rank may use of each tier.
        conditions: What else decides.

    Raises:
        BudgetError: None fits; it says what is short, and the smallest change that fits.
    """
    return search(Asked(sizes, budget, conditions)).chosen.plan


def candidates(asked: Asked) -> list[Plan]:
    """Return the placements that are tried, from the one that holds most to the one that least.

    1. parameters on DEVICE (HOST where the CPU is the device), states on HOST;
    2. the same, states on DISK behind a ring of 48 MiB;
    3. parameters on HOST, states on HOST; 4. the same, states on DISK;
    5. parameters and states on DISK, three units at a time in memory, and as many more as are
       fetched ahead where there is room (``buffer_pool_bytes``);
    6. the same with overlap="backward", where no more than a window of 64 MiB and one unit of
       gradients wait for their update.

    Args:
        asked: The model, the budget and what is known of the machine.
    """
    away = not asked.conditions.device_is_host
    above = (Tier.DEVICE, Tier.HOST) if away else (Tier.HOST,)
    pairs = [(t, s) for t in above for s in (Tier.HOST, Tier.DISK)] + [(Tier.DISK, Tier.DISK)]
    plans = []
    for parameters, states in pairs:
        if asked.conditions.states not in {None, states}:
            continue
        free: tuple[Overlap, ...] = ("none", "backward") if parameters == Tier.DISK else ("none",)
        for overlap in free if asked.overlap is None else (asked.overlap,):
            if overlap == "forward" and parameters == Tier.DISK:
                continue  # a plan refuses it
            plans.append(asked.base.but(parameters=parameters, states=states, overlap=overlap))
    return plans


def _try_all(asked: Asked) -> Iterator[Alternative]:
    """Yield every placement, and behind one that fits what other overlaps make of it."""
    for plan in candidates(asked):
        found = _try(plan, asked)
        yield found
        if found.step is None:
            continue
        spent = _spend(found.plan, asked)
        if spent is not None:
            yield _try(spent, asked)
        if asked.overlap is None and plan.parameters != Tier.DISK:
            for overlap in ("forward", "backward"):
                yield _try((spent or plan).but(overlap=overlap), asked)


def _spend(plan: Plan, asked: Asked) -> Plan | None:
    """Return a plan whose states on disk have what the budget leaves of HOST; None: nothing."""
    limit = asked.budget.bytes_of(Tier.HOST)
    if not asked.spend or limit is None or plan.states != Tier.DISK or plan.ram_budget is not None:
        return None
    held = states_of(plan, asked.sizes, asked.conditions)
    left = limit - bytes_of(plan, asked.sizes, asked.conditions)[Tier.HOST]
    least = max(DEFAULT_RING_BYTES, held.ring_bytes)
    if left < DEFAULT_RING_BYTES:
        return None
    return plan.but(ram_budget=least + min(left - (least - held.ring_bytes), held.logical_bytes))


def _try(plan: Plan, asked: Asked) -> Alternative:
    found = fit(plan, asked.sizes, asked.budget, asked.conditions)
    if not isinstance(found, Plan):
        return Alternative(plan, found)
    step = None
    machine, batch = asked.machine, asked.batch
    if machine is None or batch is None:
        return Alternative(found, {})
    if machine.disk is not None or not uses_disk(found):
        step = time_of(found, asked.sizes, asked.conditions, batch, machine)
    return Alternative(found, {}, step)


def uses_disk(plan: Plan) -> bool:
    """Return whether a plan has parameters or states on disk.

    Args:
        plan: The plan.
    """
    return Tier.DISK in {plan.parameters, plan.states, *plan.units.values()}


def _what_is_short(tried: Sequence[Alternative], budget: Budget) -> str:
    """Return what the nearest placement lacks, and the smallest change of the budget that fits."""
    nearest = min(tried, key=lambda each: (len(each.short), sum(each.short.values())))
    told = " and ".join(f"{format_bytes(n)} of {t.upper()}" for t, n in nearest.short.items())
    least = " and ".join(
        f"{tier}={(budget.bytes_of(tier) or 0) + missing}"
        for tier, missing in nearest.short.items()
    )
    return (
        f"The model does not fit: {told} more than the budget are needed. The smallest change that"
        f" fits, in bytes: {least}; or train on more ranks."
    )
