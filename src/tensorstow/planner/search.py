"""The search for a plan: the fastest by the rates of those that fit; without rates the first.

[Note: What is tried] Parameters and states on each tier; where that does not fit, some units there
and the rest on each tier below, or some on the device and the rest on host and disk; of those that
fit, each overlap, host memory that is left for states, and updates on the device. All of it again
in smaller formats, with the batch in more micro-batches, and with activations that are not kept,
where the caller allows that: a placement that fits with fewer micro-batches, or with activations
kept, is not tried again, which only adds work. Where nothing fits that refuses nothing, all of it
again beside backward, and with states in host memory while parameters are on disk.

[Note: How many units] Units go up by size, from the largest down (what the others pass through is
as large as the largest of them) and from the smallest up; of equal ones the first of the model,
whose gradients land last. Models have units of two sizes, blocks and what is around them: these two
orders then have every choice that differs. Bytes and seconds are nearly convex in how many go up,
so a few numbers are tried, and then those beside the best. On three tiers the device has what it
has beside the disk alone, and the host takes of the rest: weights on the device have a copy there,
which updates write, so that fewer of them would make no room for others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.budget import Budget
from tensorstow.base.errors import BudgetError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_bytes
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import Overlap, UpdateOn, reaches_device
from tensorstow.formats.state_format import StateFormat
from tensorstow.planner.placement import Conditions, HeldActivations, bytes_of, fit, states_of
from tensorstow.planner.seconds import MachineRates, MicroBatch, StepTime, time_of, work_of
from tensorstow.planner.sizes import Sizes, UnitSizes
from tensorstow.states.layout import DEFAULT_RING_BYTES

_GAIN = 0.02
"""Minimum relative speed-up for choosing a more complex plan."""
_GRID = 8
"""Into how many parts the numbers of units are cut that are tried at first."""


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """The batch of a step in so many micro-batches, and what blocks do with their activations."""

    times: int
    """Factor by which the number of micro-batches is multiplied."""
    batch: MicroBatch
    activations: HeldActivations
    placement: ActivationPlacement = "keep"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was tried."""

    plan: Plan
    short: dict[Tier, int]
    """Bytes that the budget lacks, by tier; empty: it fits."""
    step: StepTime | None = None
    """None: it does not fit, or no rates are known."""
    conditions: Conditions = field(default_factory=lambda: Conditions(device_is_host=True))
    """What else decides: of the states' format and of activations another than was requested."""
    batch: MicroBatch | None = None
    """One micro-batch."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plans that were tried, and the one that was chosen."""

    chosen: Alternative
    tried: tuple[Alternative, ...]

    def distinct(self) -> list[Alternative]:
        """Return the chosen plan and the best of each other kind, in the order of ``tried``.

        Plans of one kind have the same on the same tiers and update at the same time and place:
        they differ in how many units, micro-batches or bytes.
        """
        best: dict[_Kind, Alternative] = {}
        for each in self.tried:
            known = best.setdefault(_kind_of(each), each)
            if known is not self.chosen and (each is self.chosen or _cost(each) < _cost(known)):
                best[_kind_of(each)] = each
        kept = {id(each) for each in best.values()}
        return [each for each in self.tried if id(each) in kept]

    def reason(self, other: Alternative) -> str:
        """Return why another plan was not chosen.

        Args:
            other: One of ``tried``.
        """
        if other.short:
            short = other.short.items()
            return ", ".join(f"{format_bytes(n)} of {tier.upper()} short" for tier, n in short)
        if other.step is None or self.chosen.step is None:
            return "it fits too; without rates the first that fits is chosen"
        took, least = other.step.seconds, self.chosen.step.seconds
        cost = f"{took:.3g} s per step"
        if other.batch is not None and other.batch.is_estimate:
            # Seconds of a batch that nobody named would be taken for those of the run.
            tokens = f"{other.batch.tokens:,} tokens"
            cost = f"about {took / least:.2f} times the chosen plan's time, at {tokens} a step"
        if other.plan.overlap == "backward" and self.chosen.plan.overlap != "backward":
            return f"{cost}; clipping and loss scaling are refused beside backward: ask for it"
        if took < least:
            return f"{cost}; less than {_GAIN:.0%} faster than the simpler plan that was chosen"
        return cost


_Kind = tuple[object, ...]


def _kind_of(each: Alternative) -> _Kind:
    """Return what tells a plan from those that differ in numbers alone."""
    plan = each.plan
    where = (plan.activations, plan.parameters, plan.states)
    if plan.activations != "keep":
        return where  # each of them is tried in every way again
    between = frozenset(plan.units.values())
    return (*where, between, plan.overlap, plan.update_on, each.conditions.state_format)


def _cost(each: Alternative) -> tuple[bool, int, float]:
    """Return what is least of the best plan: bytes that are short, else seconds."""
    seconds = 0.0 if each.step is None else each.step.seconds
    return bool(each.short), sum(each.short.values()), seconds


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a search is for."""

    sizes: Sizes
    budget: Budget
    conditions: Conditions
    base: Plan = field(default_factory=Plan)
    """Plan fields that the search does not change: micro-batches, stage, replicas."""
    overlap: Overlap | None = None
    """Where the user says when updates run; None: the search says it."""
    spend: bool = True
    """Whether host memory that the budget leaves may hold states of a plan that has them on disk
    (``Plan.ram_budget``)."""
    batch: MicroBatch | None = None
    machine: MachineRates | None = None
    """None: no rates are known, and the first placement that fits is chosen."""
    formats: tuple[StateFormat, ...] = ()
    """Formats of states that may be taken beside the one of ``conditions``."""
    micro_batchings: tuple[MicroBatching, ...] = ()
    """More micro-batches, and other placements of activations, that may be taken: first those that
    keep activations, of each placement from fewest to most."""
    on_device: bool = False
    """Whether updates may run on an accelerator: the optimizer takes ``update_on``."""
    update_on: UpdateOn | None = None
    """Where the user says that updates run; None: the search says it."""
    widely: bool = False
    """Whether parameters may be on disk while states are in host memory: for little disk space."""


def search(request: PlanRequest) -> SearchResult:
    """Return the fastest plan that fits, of those that refuse nothing; without rates the first.

    ``overlap="backward"`` refuses clipping and loss scaling: it is chosen only where nothing else
    fits. Of plans that are as fast, the one that holds most in the highest tiers is first.

    Args:
        request: The model, the budget and what is known of the machine.

    Raises:
        BudgetError: None fits; it says what is short, and the smallest change that fits.
        OptionError: The profile lacks a rate.
    """
    done: _Done = []
    tried = list(_try_all(request, done))
    if not any(not each.short and each.plan.overlap != "backward" for each in tried):
        tried += _try_what_is_left(request, done)
    fitting = [each for each in tried if not each.short]
    if not fitting:
        raise BudgetError(_what_is_short(tried, request.budget))
    free = [each for each in fitting if each.plan.overlap != "backward"] or fitting
    chosen = free[0]
    for each in free[1:]:
        if each.step is None or chosen.step is None:
            continue
        if each.step.seconds < (1 - _GAIN) * chosen.step.seconds:
            chosen = each
    return SearchResult(chosen, tuple(_told(tried)))


def _told(tried: Sequence[Alternative]) -> list[Alternative]:
    """Return each plan once, without those with units on two tiers that do not fit."""
    told: list[Alternative] = []
    for each in tried:
        again = any(each.plan == one.plan and each.conditions == one.conditions for one in told)
        if not (again or (each.short and each.plan.units)):
            told.append(each)
    return told


def auto_plan(sizes: Sizes, budget: Budget, conditions: Conditions) -> Plan:
    """Return the first placement that fits a budget.

    Args:
        sizes: The model, as one rank's share.
        budget: Bytes that each rank may use of each tier.
        conditions: What else decides.

    Raises:
        BudgetError: None fits; it says what is short, and the smallest change that fits.
    """
    return search(PlanRequest(sizes, budget, conditions)).chosen.plan


def candidates(request: PlanRequest) -> list[Plan]:
    """Return the placements that are tried, from the one that holds most to the one that least.

    1. parameters on DEVICE (HOST where the CPU is the device), states on HOST;
    2. the same, states on DISK behind a ring of 48 MiB;
    3. parameters on HOST, states on HOST; 4. the same, states on DISK;
    5. parameters and states on DISK, three units at a time in memory, and as many more as are
       fetched ahead where there is room (``buffer_pool_bytes``);
    6. the same with overlap="backward", where no more than a window of 64 MiB and one unit of
       gradients wait for their update;
    7. ``request.widely``: parameters on DISK, states on HOST.

    Args:
        request: The model, the budget and what is known of the machine.
    """
    away = not request.conditions.device_is_host
    above = (Tier.DEVICE, Tier.HOST) if away else (Tier.HOST,)
    pairs = [(t, s) for t in above for s in (Tier.HOST, Tier.DISK)] + [(Tier.DISK, Tier.DISK)]
    if request.widely:
        pairs.append((Tier.DISK, Tier.HOST))
    plans = []
    for parameters, states in pairs:
        if request.conditions.states not in {None, states}:
            continue
        free: tuple[Overlap, ...] = ("none", "backward") if parameters == Tier.DISK else ("none",)
        for overlap in free if request.overlap is None else (request.overlap,):
            there = reaches_device(request.update_on)
            if overlap == "forward" and (there or parameters == Tier.DISK):
                continue  # a plan refuses it
            if there and parameters != Tier.DEVICE:
                continue
            plan = request.base.but(parameters=parameters, states=states, overlap=overlap)
            plans.append(plan.but(update_on=request.update_on))
    return plans


def fits_with_activations_kept(request: PlanRequest) -> bool:
    """Return whether a budget holds all else as high as it can be, in some micro-batches.

    Args:
        request: The model, the budget, and its activations.
    """
    first = candidates(request)[0]
    held = [request.conditions.activations]
    held += [each.activations for each in request.micro_batchings]
    return any(
        isinstance(
            fit(
                first,
                request.sizes,
                request.budget,
                replace(request.conditions, activations=each),
            ),
            Plan,
        )
        for each in held
    )


_Done = list[tuple[tuple[Plan, Conditions, bool], list[Alternative]]]
"""What was tried before, which is told again and not tried again."""


def _try_all(request: PlanRequest, done: _Done) -> Iterator[Alternative]:
    """Yield every placement in every variant that is allowed; [Note: What is tried]."""
    fitting: list[Alternative] = []
    """Whole tiers that need no more micro-batches, and no more of their activations elsewhere."""
    for variant in _variants(request):
        if request.machine is None and fitting:
            return  # nothing says that less of it would be faster
        known = {
            (each.plan.parameters, each.plan.states)
            for each in fitting
            if _holds_more(each, variant)
        }
        for plan in candidates(variant):
            if (plan.parameters, plan.states) in known:
                continue
            for found in _try_once(plan, variant, done):
                if not found.short and not found.plan.units:
                    fitting.append(found)
                yield found
                yield from _try_times(found, variant)


def _holds_more(found: Alternative, variant: PlanRequest) -> bool:
    """Return whether a plan of no more micro-batches keeps activations, or does the same with them.

    What a variant adds to it is work.
    """
    return (
        found.conditions.state_format == variant.conditions.state_format
        and found.plan.accumulation_steps <= variant.base.accumulation_steps
        and found.plan.activations in {"keep", variant.base.activations}
    )


def _variants(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yield what was requested, in other formats, in more micro-batches, with less kept."""
    formats = (request.conditions.state_format, *request.formats)
    for batching in (None, *request.micro_batchings):
        for kept_as in formats:
            conditions, base, batch = request.conditions, request.base, request.batch
            if batching is not None:
                conditions = replace(conditions, activations=batching.activations)
                base = base.but(
                    accumulation_steps=batching.times * base.accumulation_steps,
                    activations=batching.placement,
                )
                batch = batching.batch
            conditions = replace(conditions, state_format=kept_as)
            yield replace(request, conditions=conditions, base=base, batch=batch)


def _try_what_is_left(request: PlanRequest, done: _Done) -> Iterator[Alternative]:
    """Yield what is worth it only where nothing else fits; [Note: What is tried]."""
    overlaps: tuple[Overlap | None, ...] = (None, "backward")
    for overlap in overlaps if request.overlap is None else (request.overlap,):
        yield from _try_all(replace(request, overlap=overlap, widely=True), done)


def _try_once(plan: Plan, request: PlanRequest, done: _Done) -> list[Alternative]:
    """Return a placement, and the best with units below; from ``done`` what is known of it."""
    asked = (plan, request.conditions, _takes_disk(plan, request))
    for each, known in done:
        if each == asked:
            return known
    found = list(_try_with_units(plan, request))
    done.append((asked, found))
    return found


def _try_with_units(plan: Plan, request: PlanRequest) -> Iterator[Alternative]:
    """Yield a placement; where it does not fit, the best with units on each tier below, too."""
    found = _try(plan, request)
    yield found
    if not found.short or reaches_device(plan.update_on):
        return
    for lower in (Tier.HOST, Tier.DISK):
        if not _is_below(lower, plan.parameters):
            continue
        if lower == Tier.DISK and not _takes_disk(plan, request):
            continue
        mixed = _best_units(plan, lower, request)
        if mixed is None:
            continue
        yield mixed
        if lower == Tier.DISK and plan.parameters == Tier.DEVICE and not mixed.short:
            three = _with_some_between(plan, mixed.plan, request)
            if three is not None:
                yield three
        if not mixed.short and request.machine is None:
            return


def _with_some_between(plan: Plan, found: Plan, request: PlanRequest) -> Alternative | None:
    """Return ``plan`` with the units on DEVICE that ``found`` has there, the rest on two tiers."""
    there = [unit.name for unit in request.sizes.units if found.tier_of(unit.name) == Tier.DEVICE]
    between = plan.but(parameters=Tier.HOST, units=dict.fromkeys(there, Tier.DEVICE))
    return _best_units(between, Tier.DISK, request)


def _is_below(lower: Tier, upper: Tier) -> bool:
    order = (Tier.DEVICE, Tier.HOST, Tier.DISK)
    return order.index(lower) > order.index(upper)


def _takes_disk(plan: Plan, request: PlanRequest) -> bool:
    """Return whether units of a plan may be on disk: states are, and stage and overlap allow it."""
    there = plan.states == Tier.DISK or request.widely
    return there and plan.stage == 3 and plan.overlap != "forward"


def _best_units(plan: Plan, lower: Tier, request: PlanRequest) -> Alternative | None:
    """Return the best plan with some units where ``plan`` has all, the rest on ``lower``.

    Those that ``plan.units`` names stay where it has them. The fastest that fits; without rates the
    one with most units above; where none fits, the one that the least is short of. None: there are
    no two units. [Note: How many units]
    """
    units = sorted(
        (u for u in request.sizes.units if u.share_bytes and u.name not in plan.units),
        key=lambda unit: -unit.share_bytes,
    )
    orders = [units]
    if len({unit.share_bytes for unit in units}) > 1:
        orders.append(sorted(units, key=lambda unit: unit.share_bytes))
    found = [_best_of_order(plan, lower, order, request) for order in orders if len(order) > 1]
    return min(found, key=_rank_of)[-1] if found else None


_Ranked = tuple[bool, int, float, int, Alternative]
"""Whether it is short, by how much, its seconds, less the bytes above; what comes first is best."""


def _rank_of(each: _Ranked) -> tuple[bool, int, float, int]:
    return each[:-1]


def _best_of_order(
    plan: Plan, lower: Tier, units: Sequence[UnitSizes], request: PlanRequest
) -> _Ranked:
    """Return the best plan with the first of ``units`` where ``plan`` has all."""
    tried: dict[int, _Ranked] = {}

    def try_count(count: int) -> None:
        if count in tried:
            return
        found = _try(_with_units(plan, lower, units, count), request)
        seconds = 0.0 if found.step is None else found.step.seconds
        above = sum(unit.share_bytes for unit in units[:count])
        tried[count] = (bool(found.short), sum(found.short.values()), seconds, -above, found)

    most = len(units) - 1
    for part in range(_GRID + 1):
        try_count(1 + part * (most - 1) // _GRID)
    while True:
        best = min(tried, key=lambda count: _rank_of(tried[count]))
        below = max((n for n in tried if n < best), default=best)
        above = min((n for n in tried if n > best), default=best)
        beside = {(below + best) // 2, (above + best) // 2} - tried.keys()
        if not beside:
            return tried[best]
        for count in beside:
            try_count(count)


def _with_units(plan: Plan, lower: Tier, units: Sequence[UnitSizes], count: int) -> Plan:
    """Return a plan with the first ``count`` units where ``plan`` has all, in as few words."""
    up, down = units[:count], units[count:]
    if len(up) < len(down):
        up_there = {u.name: plan.parameters for u in up}
        return plan.but(parameters=lower, units={**plan.units, **up_there})
    return plan.but(units={**plan.units, **{u.name: lower for u in down}})


def _try_times(found: Alternative, request: PlanRequest) -> Iterator[Alternative]:
    """Yield what other times and places of updates make of a plan that fits."""
    if found.step is None:
        return
    plan, on_disk = found.plan, Tier.DISK in {found.plan.parameters, *found.plan.units.values()}
    spent = _spend(plan, request)
    if spent is not None:
        yield _try(spent, request)
    free = spent or plan
    if request.overlap is None:
        late = on_disk or reaches_device(plan.update_on)
        overlaps: tuple[Overlap, ...] = ("backward",) if late else ("forward", "backward")
        if not on_disk or plan.units:
            for overlap in overlaps:
                yield _try(free.but(overlap=overlap), request)
    if not (request.on_device and _may_update_there(plan, request)):
        return
    own: tuple[Overlap, ...] = (
        ("none", "backward") if request.overlap is None else (request.overlap,)
    )
    for where in ("device", "hybrid"):
        for overlap in own:
            yield _try(free.but(update_on=where, overlap=overlap), request)


def _may_update_there(plan: Plan, request: PlanRequest) -> bool:
    """Return whether updates of a plan may run on the accelerator, at a rate that is known."""
    if request.conditions.device_is_host or plan.update_on is not None or request.machine is None:
        return False
    if {plan.parameters, *plan.units.values()} != {Tier.DEVICE} or request.overlap == "forward":
        return False
    work = work_of(plan, request.sizes, request.conditions)
    return work.updates.keys() <= request.machine.profile.device_update.keys()


def _spend(plan: Plan, request: PlanRequest) -> Plan | None:
    """Return a plan whose states on disk have what the budget leaves of HOST; None: nothing."""
    limit = request.budget.bytes_of(Tier.HOST)
    if (
        not request.spend
        or limit is None
        or plan.states != Tier.DISK
        or plan.ram_budget is not None
    ):
        return None
    held = states_of(plan, request.sizes, request.conditions)
    left = limit - bytes_of(plan, request.sizes, request.conditions)[Tier.HOST]
    least = max(DEFAULT_RING_BYTES, held.ring_bytes)
    if left < DEFAULT_RING_BYTES:
        return None
    return plan.but(ram_budget=least + min(left - (least - held.ring_bytes), held.logical_bytes))


def _try(plan: Plan, request: PlanRequest) -> Alternative:
    conditions, machine, batch = request.conditions, request.machine, request.batch
    found = fit(plan, request.sizes, request.budget, conditions)
    if not isinstance(found, Plan):
        return Alternative(plan, found, None, conditions, batch)
    step = None
    known = machine is not None and (machine.disk is not None or not uses_disk(found))
    if machine is not None and batch is not None and known:
        step = time_of(found, request.sizes, conditions, batch, machine)
    return Alternative(found, {}, step, conditions, batch)


def uses_disk(plan: Plan) -> bool:
    """Return whether a plan has parameters, states or activations on disk.

    Args:
        plan: The plan.
    """
    on_disk = Tier.DISK in {plan.parameters, plan.states, *plan.units.values()}
    return on_disk or "disk" in plan.activation_placements


def _what_is_short(tried: Sequence[Alternative], budget: Budget) -> str:
    """Return what the nearest placement lacks, and the smallest change of the budget that fits."""
    nearest = min(tried, key=lambda each: (len(each.short), sum(each.short.values())))
    told = " and ".join(f"{format_bytes(n)} of {t.upper()}" for t, n in nearest.short.items())
    enough = {t: (budget.bytes_of(t) or 0) + missing for t, missing in nearest.short.items()}
    least = " and ".join(f"{tier}={n} ({format_bytes(n)})" for tier, n in enough.items())
    beside = nearest.plan.overlap == "backward"
    but = ' (with overlap="backward", which refuses clipping and loss scaling)' if beside else ""
    return (
        f"The model does not fit: {told} more than the budget are needed. The smallest change that"
        f" fits{but}, in bytes: {least}; or train on more ranks."
    )
