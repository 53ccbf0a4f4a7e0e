"""The bytes that a plan holds on each tier.

Arithmetic over sizes, by the functions that the run itself uses: the layout of states, the memory
of units on disk, the bounds of what is under way.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tensorstow.activations.offload import DEFAULT_RAM_BUDGET
from tensorstow.base.budget import Budget
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import round_up
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import reaches_device
from tensorstow.formats.state_format import StateFormat
from tensorstow.io.files import ALIGN
from tensorstow.planner.bounds import (
    MAX_IN_FLIGHT_BYTES,
    PIECE_BUFFERS,
    PIECE_BYTES,
    UNITS_UNSHARDED,
    upload_buffers,
)
from tensorstow.planner.sizes import (
    Sizes,
    UnitSizes,
    bytes_around,
    least_in_memory,
    most_in_memory,
)
from tensorstow.states.layout import LEAST_SLOTS, Family
from tensorstow.states.memory import (
    DEFAULT_STAGING_BYTES,
    MOST_DEVICE_SLOTS,
    StateMemory,
    chunks_of,
    device_slots,
    plan_staging,
    predict_whole,
)
from tensorstow.states.offload_policy import format_of
from tensorstow.states.policy import PipelinePolicy
from tensorstow.step.backward_overlap import WINDOW_BYTES


@dataclass(frozen=True, slots=True)
class HeldActivations:
    """Bytes of the activations of one micro-batch, under what a plan does with them."""

    peak: int = 0
    """At most, where forward and backward compute."""
    beside_gradients: int = 0
    """Of those at the same time as all gradients, at most."""
    saved: int = 0
    """That blocks move to host memory or disk in forward; the others are without them."""
    largest_saved: int = 0
    """The largest storage of these."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What decides about a run's memory beside its model and its plan."""

    device_is_host: bool
    """Whether the CPU computes."""
    commits: bool = False
    """Whether it commits: then weights and states are on disk twice, the last commit's and the
    next one's."""
    state_format: StateFormat | None = None
    """None: the least bytes that lose nothing, where states move."""
    activations: HeldActivations = HeldActivations()
    """Of no bytes where nobody has traced a batch."""
    states: Tier | None = None
    """Where the user says that states go; None: the plan says it."""

    @property
    def compute_tier(self) -> Tier:
        """Return the tier that forward and backward compute in."""
        return Tier.HOST if self.device_is_host else Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes that one rank holds for one purpose."""

    tier: Tier
    what: str
    nbytes: int


def fit(plan: Plan, sizes: Sizes, budget: Budget, conditions: Conditions) -> Plan | dict[Tier, int]:
    """Return ``plan`` where a budget holds it, or the bytes that are short by tier.

    Units on disk are given of HOST what is left of it: whole units, and no more than they ask for.

    Args:
        plan: The plan.
        sizes: The model, as one rank's share.
        budget: Bytes that each rank may use of each tier.
        conditions: What else decides.
    """
    units = units_on(Tier.DISK, plan, sizes)
    on_disk, around = [unit.share_bytes for unit in units], bytes_around(units)
    tight = plan
    if on_disk and plan.buffer_pool_bytes is None:
        tight = plan.but(buffer_pool_bytes=least_in_memory(on_disk, around))
    needed = bytes_of(tight, sizes, conditions)
    limits = {tier: budget.bytes_of(tier) for tier in Tier}
    short = {t: needed[t] - n for t, n in limits.items() if n is not None and needed[t] > n}
    if short:
        return short
    room = limits[Tier.HOST]
    if tight is plan or room is None:
        return plan
    wanted = most_in_memory(on_disk, plan.prefetch, around)
    least = least_in_memory(on_disk, around)
    more = min(room - needed[Tier.HOST], wanted - least)
    return plan.but(buffer_pool_bytes=least + more - more % max(on_disk))


def bytes_of(plan: Plan, sizes: Sizes, conditions: Conditions) -> Mapping[Tier, int]:
    """Return what a plan holds on each tier of one rank, in bytes.

    Args:
        plan: The plan.
        sizes: The model, as one rank's share.
        conditions: What else decides.
    """
    held = dict.fromkeys(Tier, 0)
    for item in items_of(plan, sizes, conditions):
        held[item.tier] += item.nbytes
    return held


def items_of(plan: Plan, sizes: Sizes, conditions: Conditions) -> list[Item]:
    """Return what a plan holds on each tier of one rank, by purpose; nothing of no bytes.

    Args:
        plan: The plan.
        sizes: The model, as one rank's share.
        conditions: What else decides.
    """
    gradients = list(_gradients(plan, sizes, conditions))
    there = sum(item.nbytes for item in gradients if item.tier == conditions.compute_tier)
    items = [
        *_parameters(plan, sizes, conditions),
        *gradients,
        *_states(plan, sizes, conditions),
        *_activations(plan, sizes, conditions, there),
    ]
    return [item for item in items if item.nbytes > 0]


def _activations(
    plan: Plan, sizes: Sizes, conditions: Conditions, gradients: int
) -> Iterable[Item]:
    """Return activations where they are computed, and those that wait elsewhere.

    ``gradients``: the bytes that are counted for them there.
    """
    held = conditions.activations
    there = _activations_beside(gradients, plan, sizes, conditions)
    yield Item(conditions.compute_tier, "activations", there)
    if plan.activations == "host":
        yield Item(Tier.HOST, "saved activations", held.saved)
    if plan.activations == "disk":
        most = activation_budget(plan) + held.largest_saved
        yield Item(Tier.HOST, "saved activations", min(held.saved, most))
        yield Item(Tier.DISK, "saved activations", moved_activations(plan, held).written)


def _activations_beside(gradients: int, plan: Plan, sizes: Sizes, conditions: Conditions) -> int:
    """Return the bytes of activations to count beside those counted for gradients.

    Activations have their peak when backward begins. Gradients of micro-batches before are there
    then; of a single one few are, so both together are less than their sum.
    """
    held, several = conditions.activations, plan.accumulation_steps > 1
    if conditions.device_is_host and not several:
        return max(held.beside_gradients, held.peak - gradients)
    if several or plan.micro_batches > 1:
        return held.peak
    # At any time at most ``gradients`` are there, others have left; and activations and gradients
    # together are at most ``beside_gradients`` and all gradients. A rank keeps its share of them.
    others = held.peak * (sizes.ranks - 1)
    together = (held.beside_gradients + others) // sizes.ranks + _waiting(sizes.units, wide=False)
    return min(held.peak, max(held.peak, together) - gradients)


@dataclass(frozen=True, slots=True)
class MovedActivations:
    """Bytes of activations that one micro-batch moves."""

    written: int = 0
    """To disk, in forward."""
    read: int = 0
    """From disk, in backward."""
    over_link: int = 0
    """From an accelerator in forward, and to it in backward."""


def activation_budget(plan: Plan) -> int:
    """Return the host memory, in bytes, that activations on disk may take."""
    given = plan.activation_ram_budget
    return DEFAULT_RAM_BUDGET if given is None else int(given)


def moved_activations(plan: Plan, held: HeldActivations) -> MovedActivations:
    """Return what blocks move, by the rule of ``activations.pool``.

    Half of the budget may be filled with what is not on disk, all of it with what is in memory.

    Args:
        plan: The plan; its ``activations`` count.
        held: Of one micro-batch.
    """
    if plan.activations not in {"host", "disk"}:
        return MovedActivations()
    if plan.activations == "host":
        return MovedActivations(over_link=held.saved)
    budget = activation_budget(plan)
    written, read = max(held.saved - budget // 2, 0), max(held.saved - budget, 0)
    return MovedActivations(written, read, held.saved)


def states_of(plan: Plan, sizes: Sizes, conditions: Conditions) -> StateMemory:
    """Return what the optimizer's states hold where, by the formula of the store of states."""
    budget = None if plan.ram_budget is None else int(plan.ram_budget)
    lines = _lines(plan, sizes, conditions)
    return _predict(lines, plan.states == Tier.DISK, conditions.commits, budget)


_Lines = tuple[tuple[Family, tuple[int, ...]], ...]


def _lines(plan: Plan, sizes: Sizes, conditions: Conditions) -> _Lines:
    """Return the families of a model's parameters, and those that share chunks."""
    families = _families(sizes, plan, conditions)
    lines: dict[tuple[torch.dtype, str | None], list[int]] = {}
    for unit in sizes.units:
        # Units whose weights come and go by themselves share no chunk.
        line = unit.name if plan.tier_of(unit.name) == Tier.DISK else None
        for dtype, elements in unit.by_dtype.items():
            lines.setdefault((dtype, line), []).extend(elements)
    return tuple((families[dtype], tuple(each)) for (dtype, _), each in lines.items())


def _families(sizes: Sizes, plan: Plan, conditions: Conditions) -> dict[torch.dtype, Family]:
    dtypes = {dtype for unit in sizes.units for dtype in unit.by_dtype}
    return {dtype: _family(dtype, plan, conditions) for dtype in dtypes}


def _family(dtype: torch.dtype, plan: Plan, conditions: Conditions) -> Family:
    moving = plan.states == Tier.DISK or conditions.commits
    kept_as = format_of(dtype, conditions.state_format, moving=moving)
    return Family(dtype, amsgrad=False, format=kept_as)


@lru_cache(maxsize=64)
def _predict(
    lines: _Lines,
    on_disk: bool,  # noqa: FBT001
    durable: bool,  # noqa: FBT001
    budget: int | None,
) -> StateMemory:
    chunk = PipelinePolicy().chunk_elements
    return predict_whole(
        lines, on_disk=on_disk, durable=durable, chunk_elements=chunk, budget=budget
    )


def units_on(tier: Tier, plan: Plan, sizes: Sizes) -> list[UnitSizes]:
    """Return the units whose parameters a plan puts on ``tier``."""
    units, others = plan.units, plan.parameters  # as plan.tier_of, which takes longer
    return [unit for unit in sizes.units if units.get(unit.name, others) is tier]


def is_whole(plan: Plan, sizes: Sizes, conditions: Conditions) -> bool:
    """Return whether one rank computes with its parameters where they are: nothing is sharded."""
    here = {Tier.DEVICE, conditions.compute_tier}
    return sizes.ranks == 1 and {plan.tier_of(unit.name) for unit in sizes.units} <= here


def _parameters(plan: Plan, sizes: Sizes, conditions: Conditions) -> Iterable[Item]:
    """Return parameters where they live, and what they pass through to be computed with."""
    compute = conditions.compute_tier
    by_tier = {tier: units_on(tier, plan, sizes) for tier in Tier}
    on_disk = by_tier[Tier.DISK]
    on_device = _share(by_tier[Tier.DEVICE])
    yield Item(compute, "parameters", on_device)
    yield Item(Tier.HOST, "parameters", _share(by_tier[Tier.HOST]))
    yield Item(Tier.DISK, "parameters", _share(on_disk))
    if on_disk:
        yield Item(Tier.HOST, "parameters from disk, in memory", in_memory_bytes(plan, on_disk))
    whole = is_whole(plan, sizes, conditions)
    in_place = sizes.ranks == 1 and conditions.device_is_host
    if not whole and not in_place:
        yield Item(compute, "unsharded parameters", _unsharded(plan, sizes))
    if conditions.device_is_host:
        return
    written = on_device
    if plan.update_on == "device" and not conditions.commits:
        # Nobody reads those of fp32, and no page of them is touched.
        idle = [u.trained for u in by_tier[Tier.DEVICE]]
        written -= sum(4 * n for unit in idle for dtype, n in unit if dtype == torch.float32)
    yield Item(Tier.HOST, "weights that updates write", written)
    below = [*by_tier[Tier.HOST], *by_tier[Tier.DISK]]
    if below:
        buffers = min(upload_buffers(plan.prefetch), len([u for u in below if u.share_bytes]))
        largest = max(unit.share_bytes for unit in below)
        yield Item(Tier.DEVICE, "buffers for parameters", buffers * largest)
        if on_disk:
            most = max(unit.share_bytes for unit in on_disk)
            yield Item(Tier.HOST, "buffers for parameters", buffers * most)


def in_memory_bytes(plan: Plan, on_disk: Sequence[UnitSizes]) -> int:
    """Return the host memory that units on disk have while they are used.

    Args:
        plan: The plan.
        on_disk: The units on disk.
    """
    pool, shares = plan.buffer_pool_bytes, [unit.share_bytes for unit in on_disk]
    most = most_in_memory(shares, plan.prefetch, bytes_around(on_disk))
    most = most if pool is None else int(pool)
    return min(most, sum(round_up(n, ALIGN) for n in shares))


def _unsharded(plan: Plan, sizes: Sizes) -> int:
    """Return the bytes of parameters that are whole at once."""
    if plan.stage < 3:
        return sizes.whole_bytes
    kept = sum(unit.whole_bytes for unit in sizes.units if unit.name in plan.unsharded)
    passing = UNITS_UNSHARDED * max((unit.whole_bytes for unit in sizes.units), default=0)
    passing += sizes.ranks * bytes_around(sizes.units)
    return min(kept + passing, sizes.whole_bytes) if kept else passing


def _gradients(plan: Plan, sizes: Sizes, conditions: Conditions) -> Iterable[Item]:
    """Return gradients of this rank's share, where they wait for their update.

    The sum of several micro-batches is fp32, of those in vertical order too.
    """
    several, wide = plan.accumulation_steps > 1, plan.micro_batches > 1
    beside = plan.overlap == "backward"
    away = not conditions.device_is_host
    units: Sequence[UnitSizes] = sizes.units
    there = units_on(Tier.DEVICE, plan, sizes) if away else []
    if there and (beside or reaches_device(plan.update_on)):
        # Backward does not wait for updates there: all may be, where they are slower.
        yield Item(Tier.DEVICE, "gradients", _waiting(there, wide=several or wide))
        units = [unit for unit in units if plan.tier_of(unit.name) != Tier.DEVICE]
        if not any(unit.trained for unit in units):
            return
    own, sums = _waiting(units, wide=wide), _waiting(units, wide=True)
    waiting = sums if several else own
    if beside and not several and not there:
        # Backward waits for updates. (Of several micro-batches updates begin in the last.)
        most = max((_waiting([unit], wide=wide) for unit in units), default=0)
        waiting = min(waiting, WINDOW_BYTES + most)
    yield Item(Tier.HOST, "gradients", waiting)
    if not away:
        return
    if several and sums > own:
        # A gradient of the first micro-batch is copied to pinned memory that stays.
        yield Item(Tier.HOST, "gradients of the first micro-batch", own)
    if several:
        yield Item(Tier.HOST, "buffers for gradients", PIECE_BUFFERS * PIECE_BYTES)
    # Beside backward no more of them leave than may wait for their updates.
    leaving = own if several else min(own, waiting)
    yield Item(Tier.DEVICE, "gradients on their way", min(leaving, MAX_IN_FLIGHT_BYTES))


def _waiting(units: Iterable[UnitSizes], *, wide: bool) -> int:
    """Return the bytes of all gradients of units, in fp32 or in their own dtypes."""
    if wide:
        return 4 * sum(unit.trained_elements for unit in units)
    return sum(unit.gradient_bytes for unit in units)


def _states(plan: Plan, sizes: Sizes, conditions: Conditions) -> Iterable[Item]:
    """Return the optimizer's states, the ring that they pass through, and commits."""
    memory = states_of(plan, sizes, conditions)
    yield Item(Tier.HOST, "states", memory.ram_bytes)
    yield Item(Tier.HOST, "ring of states", memory.ring_bytes)
    yield from _on_the_link(plan, sizes, conditions)
    if conditions.commits:
        frozen = sizes.share_bytes - sum(unit.gradient_bytes for unit in sizes.units)
        yield Item(Tier.DISK, "two commits", 2 * (memory.file_bytes + max(frozen, 0)))
    else:
        yield Item(Tier.DISK, "states", memory.file_bytes)


def _on_the_link(plan: Plan, sizes: Sizes, conditions: Conditions) -> Iterable[Item]:
    """Return what gradients and states of parameters on an accelerator pass through.

    Which chunks the device updates does not count: either side may have any.
    """
    if conditions.device_is_host or not units_on(Tier.DEVICE, plan, sizes):
        return
    counts: dict[torch.dtype, list[int]] = {}
    ours: dict[torch.dtype, list[bool]] = {}
    for unit in sizes.units:
        tier = plan.tier_of(unit.name)
        if tier == Tier.DISK:
            continue
        for dtype, elements in unit.by_dtype.items():
            counts.setdefault(dtype, []).extend(elements)
            ours.setdefault(dtype, []).extend([tier == Tier.DEVICE] * len(elements))
    families = _families(sizes, plan, conditions)
    lines = tuple((families[d], tuple(own), tuple(ours[d])) for d, own in counts.items())
    staged, slots = _buffers_of(lines)
    if plan.update_on != "device":
        yield Item(Tier.HOST, "buffers for gradients of chunks", staged)
    if reaches_device(plan.update_on):
        yield Item(Tier.DEVICE, "buffers for states", slots)


@lru_cache(maxsize=256)
def _buffers_of(
    lines: tuple[tuple[Family, tuple[int, ...], tuple[bool, ...]], ...],
) -> tuple[int, int]:
    """Return the bytes of gradients of chunks in host memory, and of states on the device.

    ``lines``: of each family the elements of its parameters, and which are on the device.
    """
    counts: dict[tuple[Family, int], int] = {}
    for line, elements, ours in lines:
        for family, each, count in chunks_of([(line, elements)], PipelinePolicy().chunk_elements):
            if any(ours[run.parameter] for run in each.runs):
                kind = (family, each.elements)
                counts[kind] = counts.get(kind, 0) + count
    chunks: list[tuple[Family, int]] = []
    for kind, count in counts.items():
        chunks += min(count, _most_slots(kind[1])) * [kind]
    slots, nbytes = device_slots(chunks)
    return plan_staging([elements for _, elements in chunks]).nbytes, slots * nbytes


def _most_slots(elements: int) -> int:
    """Return how many slots chunks of so many elements ever pass through: more make no more."""
    staged = DEFAULT_STAGING_BYTES // (torch.float32.itemsize * elements)
    return max(LEAST_SLOTS, MOST_DEVICE_SLOTS, staged)


def _share(units: Sequence[UnitSizes]) -> int:
    return sum(unit.share_bytes for unit in units)
