"""The search for a plan: the fastest that fits by the machine's rates; without rates the first.

[Note: What is tried] The search tries parameters and states on each tier. If a placement does not
fit, it tries some units on that tier and the rest on each tier below, or some on the device and the
rest on host and disk. For each placement that fits it tries each overlap, unused host memory for
states, and updates on the device. If the caller allows it, all of this is repeated in smaller
formats, with more micro-batches, and with activations that are not kept; a placement that already
fits with fewer micro-batches, or with activations kept, is not tried again, because the variant
only adds work. If nothing fits that allows clipping and loss scaling, all of this is repeated with
overlap="backward", and with states in host memory while parameters are on disk.

[Note: How many units] Units move to the upper tier in two orders: from the largest down (the
buffers for the others are as large as the largest of them) and from the smallest up. Equal units
go in model order, so that gradients of the first, which arrive last, are on the upper tier. Most
models have units of two sizes, blocks and the rest, and for those the two orders cover every choice
that matters. Bytes and seconds are nearly convex in the number of units, so the search tries a few
numbers, then the neighbors of the best. On three tiers the device keeps the units that it has with
disk alone, and the host takes some of the rest: weights on the device have a copy on the host,
which updates write, so fewer units on the device would not make room for others on the host.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.budget import Budget
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_bytes
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import Overlap, OverlapOption, UpdateOn, reaches_device
from tensorstow.formats.state_format import StateFormat
from tensorstow.planner.placement import Conditions, HeldActivations, bytes_of, fit, states_of
from tensorstow.planner.seconds import MachineRates, MicroBatch, StepTime, time_of, work_of
from tensorstow.planner.sizes import Sizes, UnitSizes
from tensorstow.states.layout import DEFAULT_RING_BYTES

FITS_TOO = "it fits too"
"""Why a plan was not chosen if no rates are known: the first that fits is."""
_GAIN = 0.02
"""Minimum relative speed-up for choosing a more complex plan."""
_GRID = 8
"""Number of intervals between the first numbers of units that are tried."""


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """A split of a step's batch into micro-batches, and a placement of their activations."""

    times: int
    """Factor by which the number of micro-batches is multiplied."""
    batch: MicroBatch
    activations: HeldActivations
    placement: ActivationPlacement = ActivationPlacement.KEEP


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was tried."""

    plan: Plan
    short: dict[Tier, int]
    """Bytes that the budget lacks, by tier; empty: it fits."""
    step: StepTime | None = None
    """None: the plan does not fit, or no rates are known."""
    conditions: Conditions = field(default_factory=lambda: Conditions(device_is_host=True))
    """What else decides; the format of states and the activations may differ from the request."""
    batch: MicroBatch | None = None
    """One micro-batch."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plans that were tried, and the one that was chosen."""

    chosen: Alternative
    tried: tuple[Alternative, ...]

    def distinct(self) -> list[Alternative]:
        """Return the chosen plan and the best of each other kind, in the order of ``tried``.

        Plans of one kind have the same tiers, time and place of updates; they differ in the number
        of units, micro-batches or bytes.
        """
        best: dict[_Kind, Alternative] = {}
        for plan in self.tried:
            so_far = best.setdefault(_kind_of(plan), plan)
            if so_far is not self.chosen and (plan is self.chosen or _cost(plan) < _cost(so_far)):
                best[_kind_of(plan)] = plan
        best_ids = {id(plan) for plan in best.values()}
        return [plan for plan in self.tried if id(plan) in best_ids]

    def reason(self, other: Alternative) -> str:
        """Return why another plan, one of ``tried``, was not chosen."""
        if other.short:
            short = other.short.items()
            return ", ".join(f"{format_bytes(n)} of {tier.upper()} short" for tier, n in short)
        if other.step is None or self.chosen.step is None:
            return FITS_TOO
        took, least = other.step.seconds, self.chosen.step.seconds
        cost = f"{took:.3g} s per step"
        if other.batch is not None and other.batch.is_estimate:
            # The user named no batch: seconds would be mistaken for those of the run.
            tokens = f"{other.batch.tokens:,} tokens"
            cost = f"about {took / least:.2f} times the chosen plan's time, at {tokens} a step"
        if self.chosen.plan.timing.allows_clipping and not other.plan.timing.allows_clipping:
            return f'{cost}; request overlap="backward" if you need no clipping and loss scaling'
        if other.plan.timing.can_undo and self.chosen.plan.states != Tier.DISK:
            return f"{cost}; its states would be on disk, and the chosen plan has them in memory"
        if took < least:
            return f"{cost}; less than {_GAIN:.0%} faster than the simpler plan that was chosen"
        return cost


_Kind = tuple[object, ...]


def _kind_of(tried: Alternative) -> _Kind:
    """Return a key that is equal for plans that differ only in numbers."""
    plan = tried.plan
    placement = (plan.activations, plan.parameters, plan.states)
    if plan.activations is not ActivationPlacement.KEEP:
        return placement  # every plan is tried again with each: the best one represents them
    between = frozenset(plan.parameter_units.values())
    return (
        *placement,
        between,
        plan.optimizer_overlap,
        plan.update_on,
        tried.conditions.state_format,
    )


def _cost(tried: Alternative) -> tuple[bool, int, float]:
    """Return the cost that the best plan minimizes: missing bytes, then seconds."""
    seconds = 0.0 if tried.step is None else tried.step.seconds
    return bool(tried.short), sum(tried.short.values()), seconds


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The input of a search."""

    sizes: Sizes
    budget: Budget
    conditions: Conditions
    base: Plan = field(default_factory=Plan)
    """Plan fields that the search does not change: micro-batches, stage, replicas."""
    overlap: Overlap | None = None
    """When updates run, if the user requires it; None: the search chooses."""
    spend: bool = True
    """Whether unused host memory of the budget may hold part of the states on disk
    (``Plan.ram_budget``)."""
    batch: MicroBatch | None = None
    machine: MachineRates | None = None
    """None: no rates are known, and the first placement that fits is chosen."""
    formats: tuple[StateFormat, ...] = ()
    """Formats of states to try in addition to that of ``conditions``."""
    micro_batchings: tuple[MicroBatching, ...] = ()
    """Numbers of micro-batches and placements of activations to try in addition: first those that
    keep activations; for each placement from fewest to most micro-batches."""
    on_device: bool = False
    """Whether updates may run on an accelerator: the optimizer takes ``update_on``."""
    update_on: UpdateOn | None = None
    """Where updates run, if the user requires it; None: the search chooses."""
    widely: bool = False
    """Whether parameters may be on disk with states in host memory, for little disk space."""


def search(request: PlanRequest) -> SearchResult:
    """Return the fastest plan that fits and allows all features; without rates the first.

    ``overlap="backward"`` excludes clipping and loss scaling: it is chosen only if nothing else
    fits. Among equally fast plans, the one that holds most in the highest tiers is first.

    Raises:
        BudgetError: No plan fits. The error reports the missing bytes and the smallest change that
            fits.
        OptionError: The profile lacks a rate.
    """
    tried: list[Alternative] = []
    fitting: list[Alternative] = []
    free: list[Alternative] = []
    for requested in _rounds(request):
        tried += _try_all(requested)
        fitting = [option for option in tried if not option.short]
        free = [option for option in fitting if option.plan.timing.allows_clipping]
        if free:
            break
    if not fitting:
        raise BudgetError(_what_is_short(tried, request.budget))
    free = free or fitting
    if any(option.plan.states != Tier.DISK for option in free):
        # A drive is not worn, and its space not taken twice, for states that fit in memory.
        free = [option for option in free if not option.plan.timing.can_undo]
    chosen = free[0]
    for option in free[1:]:
        if option.step is None or chosen.step is None:
            continue
        if option.step.seconds < (1 - _GAIN) * chosen.step.seconds:
            chosen = option
    return SearchResult(chosen, tuple(_reported(tried)))


def search_by_rates(
    request: PlanRequest, machine: MachineRates | None
) -> tuple[SearchResult, str | None]:
    """Search with a machine's rates, or by bytes alone if it lacks one that a plan needs.

    Returns:
        The result, and which rate is lacking; None: all are known, or ``machine`` is None.
    """
    try:
        return search(replace(request, machine=machine)), None
    except OptionError as error:
        return search(replace(request, machine=None)), str(error)


def _reported(tried: Sequence[Alternative]) -> list[Alternative]:
    """Return each plan once, without those with units on two tiers that do not fit."""
    unique: list[Alternative] = []
    for option in tried:
        again = any(option.plan == u.plan and option.conditions == u.conditions for u in unique)
        if not (again or (option.short and option.plan.parameter_units)):
            unique.append(option)
    return unique


def candidates(request: PlanRequest) -> list[Plan]:
    """Return the placements to try, from the most memory to the least.

    They have ``Plan``'s own overlap, if the user requires none.

    1. parameters on DEVICE (HOST where the CPU is the device), states on HOST;
    2. the same, states on DISK through a ring of 48 MiB;
    3. parameters on HOST, states on HOST; 4. the same, states on DISK;
    5. parameters and states on DISK, three units at a time in memory, and as many more as are
       fetched ahead if there is room (``weight_ram_budget``);
    6. the same with overlap="backward", with at most a window of 64 MiB and one unit of gradients
       that wait for their update (beside an accelerator a few units, if those are more);
    7. ``request.widely``: parameters on DISK, states on HOST.
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
        free: tuple[OverlapOption, ...] = (
            ("auto", "backward") if parameters == Tier.DISK else ("auto",)
        )
        for overlap in free if request.overlap is None else (request.overlap,):
            plan = request.base.but(states=states, overlap=overlap)
            on_device = reaches_device(request.update_on)
            if plan.timing.waits_by_module and on_device:
                continue  # Plan raises an error for it
            if on_device and parameters != Tier.DEVICE:
                continue
            plans.append(plan.but(parameters=parameters, update_on=request.update_on))
    return plans


def with_placed_activations(request: PlanRequest, placed: Iterable[MicroBatching]) -> PlanRequest:
    """Return the request with other placements of activations, if it does not fit without.

    Args:
        request: The request, whose micro-batchings keep activations.
        placed: Micro-batchings that place activations elsewhere. Tracing them takes seconds, so an
            iterator is read only if it is needed.
    """
    first = candidates(request)[0]
    smaller = (batching.activations for batching in request.micro_batchings)
    for activations in (request.conditions.activations, *smaller):
        conditions = replace(request.conditions, activations=activations)
        if isinstance(fit(first, request.sizes, request.budget, conditions), Plan):
            return request
    return replace(request, micro_batchings=(*request.micro_batchings, *placed))


def _rounds(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yield the requests to search, one after the other until a plan allows all features."""
    yield request
    yield (wide := replace(request, widely=True))
    if request.overlap is None:
        yield replace(wide, overlap="backward")


def _try_all(request: PlanRequest) -> Iterator[Alternative]:
    """Yield every placement in every allowed variant; [Note: What is tried]."""
    fitting: list[Alternative] = []
    """Plans without ``units`` that fit: variants that only add work to them are not tried."""
    for variant in _variants(request):
        if request.machine is None and fitting:
            return  # without rates, no later variant can be known to be faster
        fitting_tiers = {
            (option.plan.parameters, option.plan.states)
            for option in fitting
            if _holds_more(option, variant)
        }
        for plan in candidates(variant):
            if (plan.parameters, plan.states) in fitting_tiers:
                continue
            for option in _try_with_units(plan, variant):
                if not option.short and not option.plan.parameter_units:
                    fitting.append(option)
                yield option
                yield from _try_times(option, variant)


def _holds_more(fitting: Alternative, variant: PlanRequest) -> bool:
    """Return whether ``variant`` only adds work to a plan that fits.

    The plan has no more micro-batches, and keeps activations or places them as the variant does.
    """
    return (
        fitting.conditions.state_format == variant.conditions.state_format
        and fitting.plan.accumulation_steps <= variant.base.accumulation_steps
        and fitting.plan.activations in {ActivationPlacement.KEEP, variant.base.activations}
    )


def _variants(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yield the request in each format, micro-batching and placement of activations."""
    formats = (request.conditions.state_format, *request.formats)
    for batching in (None, *request.micro_batchings):
        for state_format in formats:
            conditions, base, batch = request.conditions, request.base, request.batch
            if batching is not None:
                conditions = replace(conditions, activations=batching.activations)
                base = base.but(
                    accumulation_steps=batching.times * base.accumulation_steps,
                    activations=batching.placement,
                )
                batch = batching.batch
            conditions = replace(conditions, state_format=state_format)
            yield replace(request, conditions=conditions, base=base, batch=batch)


def _try_with_units(plan: Plan, request: PlanRequest) -> Iterator[Alternative]:
    """Yield a placement; if it does not fit, also the best with units on each lower tier."""
    whole = _try(plan, request)
    yield whole
    if not whole.short or reaches_device(plan.update_on):
        return
    tiers = list(Tier)  # from above to below
    for lower in tiers[tiers.index(plan.parameters) + 1 :]:
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


def _with_some_between(plan: Plan, mixed: Plan, request: PlanRequest) -> Alternative | None:
    """Return ``plan`` with the units on DEVICE that ``mixed`` has on it, the rest on two tiers."""
    names = [unit.name for unit in request.sizes.units if mixed.tier_of(unit.name) == Tier.DEVICE]
    between = plan.but(parameters=Tier.HOST, parameter_units=dict.fromkeys(names, Tier.DEVICE))
    return _best_units(between, Tier.DISK, request)


def _takes_disk(plan: Plan, request: PlanRequest) -> bool:
    """Return whether units of a plan may be on disk: states are, and the stage allows it."""
    return (plan.states == Tier.DISK or request.widely) and plan.stage == 3


def _best_units(plan: Plan, lower: Tier, request: PlanRequest) -> Alternative | None:
    """Return the best plan with some units on ``plan.parameters``' tier, the rest on ``lower``.

    Units in ``plan.parameter_units`` stay on their tier. The best plan is the fastest that fits;
    without rates the one with most units above; if none fits, the one that lacks the fewest bytes.
    None: the model has fewer than two units to place. [Note: How many units]
    """
    units = sorted(
        (u for u in request.sizes.units if u.share_bytes and u.name not in plan.parameter_units),
        key=lambda unit: -unit.share_bytes,
    )
    orders = [units]
    if len({unit.share_bytes for unit in units}) > 1:
        orders.append(sorted(units, key=lambda unit: unit.share_bytes))
    ranked = [_best_of_order(plan, lower, order, request) for order in orders if len(order) > 1]
    return min(ranked, key=itemgetter(0))[1] if ranked else None


_Rank = tuple[bool, int, float, int]
"""Whether bytes are missing, how many, seconds, and minus the bytes above; the least is best."""


def _best_of_order(
    plan: Plan, lower: Tier, units: Sequence[UnitSizes], request: PlanRequest
) -> tuple[_Rank, Alternative]:
    """Return the best plan with the first of ``units`` on the tier of ``plan.parameters``."""
    tried: dict[int, tuple[_Rank, Alternative]] = {}
    # At least one unit is on either tier: all on one tier is a placement of its own.
    most = len(units) - 1
    counts = {1 + part * (most - 1) // _GRID for part in range(_GRID + 1)}
    while counts:
        for count in counts:
            option = _try(_with_units(plan, lower, units, count), request)
            above = sum(unit.share_bytes for unit in units[:count])
            tried[count] = ((*_cost(option), -above), option)
        best = min(tried, key=lambda count: tried[count][0])
        below = max((n for n in tried if n < best), default=best)
        above = min((n for n in tried if n > best), default=best)
        # Halve the gaps on both sides, until the best is next to two that were tried.
        counts = {(below + best) // 2, (above + best) // 2} - tried.keys()
    return tried[best]


def _with_units(plan: Plan, lower: Tier, units: Sequence[UnitSizes], count: int) -> Plan:
    """Return a plan with ``count`` units on ``plan.parameters``' tier, in its shortest form."""
    up, down = units[:count], units[count:]
    if len(up) < len(down):
        upper = {u.name: plan.parameters for u in up}
        return plan.but(parameters=lower, parameter_units={**plan.parameter_units, **upper})
    return plan.but(parameter_units={**plan.parameter_units, **{u.name: lower for u in down}})


def _try_times(fitting: Alternative, request: PlanRequest) -> Iterator[Alternative]:
    """Yield a plan that fits with other times and places of updates."""
    if fitting.step is None:
        return
    plan = fitting.plan
    on_disk = Tier.DISK in plan.parameter_tiers
    spent = _spend(plan, request)
    if spent is not None:
        yield _try(spent, request)
    free = spent or plan
    if request.overlap is None:
        # "forward" is what "auto" means with units on disk, and updates on the device refuse it.
        late = on_disk or reaches_device(plan.update_on)
        overlaps: tuple[Overlap, ...] = ("backward",) if late else ("forward", "backward")
        # ``candidates`` has "backward" already for a plan with all parameters on disk.
        if not on_disk or plan.parameter_units:
            for overlap in overlaps:
                yield _try(free.but(overlap=overlap), request)
        if not free.timing.begins_early and _may_be_undone(free, request):
            yield _try(free.but(overlap="speculative"), request)
    if not (request.on_device and _may_update_on_device(plan, request)):
        return
    device_overlaps: tuple[OverlapOption, ...] = (
        ("auto", "backward") if request.overlap is None else (request.overlap,)
    )
    for update_on in ("device", "hybrid"):
        for device_overlap in device_overlaps:
            yield _try(free.but(update_on=update_on, overlap=device_overlap), request)


def _may_be_undone(plan: Plan, request: PlanRequest) -> bool:
    """Return whether the search may choose updates of a plan that ``step()`` undoes.

    Several ranks would undo each step of a loop whose micro-batches nobody has counted.
    """
    is_of_host = not reaches_device(plan.update_on) and plan.ordered_reduce is None
    return plan.states == Tier.DISK and is_of_host and request.sizes.ranks == 1


def _may_update_on_device(plan: Plan, request: PlanRequest) -> bool:
    """Return whether updates of a plan may run on the accelerator, at a measured rate."""
    if request.conditions.device_is_host or plan.update_on is not None or request.machine is None:
        return False
    if plan.parameter_tiers != {Tier.DEVICE} or plan.timing.waits_by_module:
        return False
    work = work_of(plan, request.sizes, request.conditions)
    return work.updates.keys() <= request.machine.profile.device_update.keys()


def _spend(plan: Plan, request: PlanRequest) -> Plan | None:
    """Return a plan with states on disk and the unused HOST bytes for them; None: too few."""
    limit = request.budget.bytes_of(Tier.HOST)
    if (
        not request.spend
        or limit is None
        or plan.states != Tier.DISK
        or plan.ram_budget is not None
    ):
        return None
    held = states_of(plan, request.sizes, request.conditions)
    used = bytes_of(plan, request.sizes, request.conditions)[Tier.HOST]
    left = request.conditions.room_in(Tier.HOST, limit - used)
    # The first DEFAULT_RING_BYTES of a RAM budget are the ring's, also if it needs fewer: only what
    # is beyond them keeps states (``plan_ring``).
    least = max(DEFAULT_RING_BYTES, held.ring_bytes)
    if left < DEFAULT_RING_BYTES:
        return None
    return plan.but(ram_budget=least + min(left - (least - held.ring_bytes), held.logical_bytes))


def _try(plan: Plan, request: PlanRequest) -> Alternative:
    conditions, machine, batch = request.conditions, request.machine, request.batch
    # What "auto" means decides the timing, by which bytes and seconds are counted.
    plan = plan.settled()
    fitted = fit(plan, request.sizes, request.budget, conditions)
    if not isinstance(fitted, Plan):
        return Alternative(plan, fitted, None, conditions, batch)  # what is missing, by tier
    step = None
    has_rates = machine is not None and (machine.disk is not None or not uses_disk(fitted))
    if machine is not None and batch is not None and has_rates:
        step = time_of(fitted, request.sizes, conditions, batch, machine)
    return Alternative(fitted, {}, step, conditions, batch)


def uses_disk(plan: Plan) -> bool:
    """Return whether a plan has parameters, states or activations on disk."""
    on_disk = Tier.DISK in {plan.states, *plan.parameter_tiers}
    return on_disk or ActivationPlacement.DISK in plan.activation_placements


def _what_is_short(tried: Sequence[Alternative], budget: Budget) -> str:
    """Return the message of a model that does not fit, with the smallest change that fits."""
    nearest = min(tried, key=lambda option: (len(option.short), sum(option.short.values())))
    lacking = " and ".join(f"{format_bytes(n)} of {t.upper()}" for t, n in nearest.short.items())
    enough = {t: (budget.bytes_of(t) or 0) + missing for t, missing in nearest.short.items()}
    least = " and ".join(f"{tier}={n} ({format_bytes(n)})" for tier, n in enough.items())
    in_backward = not nearest.plan.timing.allows_clipping
    but = ' (with overlap="backward", without clipping and loss scaling)' if in_backward else ""
    lacking += ", headroom included" if nearest.conditions.headroom else ""
    return (
        f"The model does not fit: the budget lacks {lacking}. The smallest change that fits{but},"
        f" in bytes: {least}; or train on more ranks."
    )
