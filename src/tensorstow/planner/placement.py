"""The bytes that a plan holds on each tier.

Arithmetic over sizes, by the functions that the run itself uses: the layout of states, the memory
of units on disk, the bounds of transfers in flight.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from tensorstow.activations.offload import DEFAULT_RAM_BUDGET
from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.budget import Budget
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import round_up
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import reaches_device, reaches_host
from tensorstow.formats.state_format import StateFormat
from tensorstow.io.allocator import is_large
from tensorstow.io.files import ALIGN
from tensorstow.planner.bounds import (
    MAX_IN_FLIGHT_BYTES,
    PIECE_BUFFERS,
    PIECE_BYTES,
    UNITS_UNSHARDED,
    upload_buffers,
)
from tensorstow.planner.headroom import Headroom
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
    predict_memory,
)
from tensorstow.states.offload_policy import format_of
from tensorstow.states.policy import PipelinePolicy
from tensorstow.step.backward_overlap import window_of

HEADROOM = "headroom, left free"
"""The purpose of the memory that no tensor takes."""


@dataclass(frozen=True, slots=True)
class HeldActivations:
    """Bytes of the activations of one micro-batch, with a plan's placement of activations."""

    peak: int = 0
    """Peak bytes on the tier that forward and backward compute in."""
    beside_gradients: int = 0
    """Peak bytes while all gradients are held."""
    saved: int = 0
    """Bytes that blocks move to host memory or disk in forward; ``peak`` leaves them out."""
    largest_saved: int = 0
    """Bytes of the largest storage that blocks move."""
    small: int = 0
    """Peak bytes of those in the C library's heap. Large tensors cannot use what these leave."""
    large: int = 0
    """Peak bytes of the others."""
    large_beside_gradients: int = 0
    """Peak bytes of the others while all gradients are held."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What determines a run's memory in addition to its model and its plan."""

    device_is_host: bool
    """Whether the CPU computes."""
    commits: bool = False
    """Whether it commits: then weights and states are on disk twice, the last commit's and the
    next one's."""
    state_format: StateFormat | None = None
    """None: the smallest exact format if states move."""
    averages: bool = False
    """Whether the optimizer keeps averages of weights (``ema=``)."""
    activations: HeldActivations = HeldActivations()
    """Zero bytes if no batch was traced."""
    states: Tier | None = None
    """The tier that the user requires for states; None: the plan's."""
    headroom: Mapping[Tier, Headroom] = field(default_factory=dict)
    """What stays free of each tier; without an entry all of it may be held."""

    def room_in(self, tier: Tier, left: int) -> int:
        """Return by how much a run can grow on a tier with ``left`` unused bytes."""
        return self.headroom.get(tier, Headroom()).growth(left)

    @property
    def compute_tier(self) -> Tier:
        """Return the tier that forward and backward compute in."""
        return Tier.HOST if self.device_is_host else Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes that one rank holds for one purpose."""

    tier: Tier
    purpose: str
    nbytes: int


def fit(plan: Plan, sizes: Sizes, budget: Budget, conditions: Conditions) -> Plan | dict[Tier, int]:
    """Return ``plan`` if it fits a budget, else the missing bytes by tier.

    Units on disk get the rest of HOST for their buffers: whole units, at most the default size.
    """
    pooled, around = _pooled(plan, sizes)
    tight = plan
    if units_on(Tier.DISK, plan, sizes) and plan.weight_ram_budget is None:
        tight = plan.but(weight_ram_budget=least_in_memory(pooled, around))
    needed = bytes_of(tight, sizes, conditions)
    limits = {tier: budget.bytes_of(tier) for tier in Tier}
    short = {t: needed[t] - n for t, n in limits.items() if n is not None and needed[t] > n}
    if short:
        return short
    room = limits[Tier.HOST]
    if tight is plan or room is None:
        return plan
    wanted = most_in_memory(pooled, plan.prefetch, around)
    least = least_in_memory(pooled, around)
    more = min(conditions.room_in(Tier.HOST, room - needed[Tier.HOST]), wanted - least)
    return plan.but(weight_ram_budget=least + more - more % max(pooled))


def bytes_of(plan: Plan, sizes: Sizes, conditions: Conditions) -> Mapping[Tier, int]:
    """Return what a plan holds on each tier of one rank, in bytes."""
    held = dict.fromkeys(Tier, 0)
    for item in items_of(plan, sizes, conditions):
        held[item.tier] += item.nbytes
    return held


def items_of(plan: Plan, sizes: Sizes, conditions: Conditions) -> list[Item]:
    """Return what a plan holds on each tier of one rank, by purpose, without items of 0 bytes."""
    gradients = list(_gradients(plan, sizes, conditions))
    on_compute_tier = sum(i.nbytes for i in gradients if i.tier == conditions.compute_tier)
    items = [
        *_parameters(plan, sizes, conditions),
        *gradients,
        *_states(plan, sizes, conditions),
        *_activations(plan, sizes, conditions, on_compute_tier),
    ]
    for tier, headroom in conditions.headroom.items():
        held = sum(item.nbytes for item in items if item.tier == tier)
        items.append(Item(tier, HEADROOM, headroom.beside(held)))
    return [item for item in items if item.nbytes > 0]


def _activations(
    plan: Plan, sizes: Sizes, conditions: Conditions, gradients: int
) -> Iterable[Item]:
    """Return activations on the tier that computes, and those saved on another tier.

    ``gradients``: the bytes of gradients on the tier that computes.
    """
    held = conditions.activations
    nbytes = _activations_beside(gradients, plan, sizes, conditions)
    yield Item(conditions.compute_tier, "activations", nbytes)
    with_copy = _activations_beside(
        gradients, plan, sizes, conditions, _copied_gradients(plan, sizes, conditions)
    )
    yield Item(conditions.compute_tier, "gradients of a unit, copied", with_copy - nbytes)
    if plan.activations is ActivationPlacement.HOST:
        yield Item(Tier.HOST, "saved activations", held.saved)
    if plan.activations is ActivationPlacement.DISK:
        most = activation_budget(plan) + held.largest_saved
        yield Item(Tier.HOST, "saved activations", min(held.saved, most))
        yield Item(Tier.DISK, "saved activations", moved_activations(plan, held).written)


def _activations_beside(
    gradients: int, plan: Plan, sizes: Sizes, conditions: Conditions, copied: int = 0
) -> int:
    """Return the bytes of activations to add to those counted for gradients.

    ``copied``: bytes of gradients that exist twice at the end of backward.

    Activations peak when backward begins. The gradients of earlier micro-batches exist then. With
    a single micro-batch few gradients do, so the common peak is less than the sum of both peaks.
    """
    held, several = conditions.activations, plan.accumulation_steps > 1
    if conditions.device_is_host and not several:
        beside = min(_large_gradients(plan, sizes), gradients)
        beside += max(held.large_beside_gradients, copied)
        # The heap keeps the pages of small activations: large tensors do not use them.
        apart = held.small + max(held.large, beside)
        return max(held.beside_gradients, copied, held.peak - gradients, apart - gradients)
    if conditions.device_is_host:
        return max(held.peak, 2 * copied)  # sums are held: new gradients and their copy come beside
    if several or plan.micro_batches > 1:
        return held.peak
    # At any time the device holds at most ``gradients``: the others have left. Activations and
    # gradients together are at most ``beside_gradients`` plus all gradients; a rank keeps its
    # share of the gradients.
    weighted_sum = held.beside_gradients + held.peak * (sizes.ranks - 1)
    together = weighted_sum // sizes.ranks + _waiting(sizes.units, wide=False)
    return min(held.peak, max(held.peak, together) - gradients)


def _copied_gradients(plan: Plan, sizes: Sizes, conditions: Conditions) -> int:
    """Return the bytes of a unit's gradients, of which FSDP2 makes one block, on a CPU."""
    if not conditions.device_is_host or is_whole(plan, sizes, conditions):
        return 0
    return sizes.ranks * max((unit.gradient_bytes for unit in sizes.units), default=0)


def _large_gradients(plan: Plan, sizes: Sizes) -> int:
    """Return the bytes of gradients outside of the C library's heap.

    The gradients of a unit on disk are in one block.
    """
    counts: list[int] = []
    wide = plan.micro_batches > 1
    for unit in sizes.units:
        if plan.tier_of(unit.name) == Tier.DISK:
            counts.append(_waiting([unit], wide=wide))
        else:
            counts += [(4 if wide else dtype.itemsize) * n for dtype, n in unit.trained]
    return sum(n for n in counts if n and is_large(n))


@dataclass(frozen=True, slots=True)
class MovedActivations:
    """Bytes of activations that one micro-batch moves."""

    written: int = 0
    """Bytes written to disk in forward."""
    read: int = 0
    """Bytes read from disk in backward."""
    over_link: int = 0
    """Bytes copied from an accelerator in forward, and back to it in backward."""


def activation_budget(plan: Plan) -> int:
    """Return the host memory, in bytes, that activations on disk may take."""
    budget = plan.activation_ram_budget
    return DEFAULT_RAM_BUDGET if budget is None else int(budget)


def moved_activations(plan: Plan, held: HeldActivations) -> MovedActivations:
    """Return what blocks move in one micro-batch, by the rule of ``activations.pool``.

    Activations that are not yet on disk may fill half of the budget; all in memory may fill it.
    """
    if plan.activations is ActivationPlacement.HOST:
        return MovedActivations(over_link=held.saved)
    if plan.activations is not ActivationPlacement.DISK:
        return MovedActivations()
    budget = activation_budget(plan)
    written, read = max(held.saved - budget // 2, 0), max(held.saved - budget, 0)
    return MovedActivations(written, read, held.saved)


def states_of(plan: Plan, sizes: Sizes, conditions: Conditions) -> StateMemory:
    """Return the memory of the optimizer's states on each tier, by the state store's formula."""
    budget = None if plan.ram_budget is None else int(plan.ram_budget)
    lines = _lines(plan, sizes, conditions)
    memory = _predict(
        lines,
        disk_fraction=float(plan.states == Tier.DISK),
        durable=conditions.commits,
        chunk_elements=PipelinePolicy().chunk,
        budget=budget,
    )
    # Each chunk has a second place.
    return replace(memory, file_bytes=2 * memory.file_bytes) if plan.timing.can_undo else memory


_predict = lru_cache(maxsize=64)(predict_memory)  # most plans of a search have the same states
_Lines = tuple[tuple[Family, tuple[int, ...]], ...]


def _lines(plan: Plan, sizes: Sizes, conditions: Conditions) -> _Lines:
    """Return the families of a model's parameters, and those that share chunks."""
    families = _families(sizes, plan, conditions)
    lines: dict[tuple[torch.dtype, str | None], list[int]] = {}
    for unit in sizes.units:
        # A unit on disk is read and written alone, so its chunks hold no other unit's states.
        line = unit.name if plan.tier_of(unit.name) == Tier.DISK else None
        for dtype, elements in unit.by_dtype.items():
            lines.setdefault((dtype, line), []).extend(elements)
    return tuple((families[dtype], tuple(counts)) for (dtype, _), counts in lines.items())


def _families(sizes: Sizes, plan: Plan, conditions: Conditions) -> dict[torch.dtype, Family]:
    dtypes = {dtype for unit in sizes.units for dtype in unit.by_dtype}
    formats = {dtype: state_format_of(dtype, plan, conditions) for dtype in dtypes}
    ema = conditions.averages
    return {dtype: Family(dtype, amsgrad=False, format=formats[dtype], ema=ema) for dtype in dtypes}


def state_format_of(dtype: torch.dtype, plan: Plan, conditions: Conditions) -> StateFormat:
    """Return the format of the states of parameters of a dtype."""
    moving = plan.states == Tier.DISK or conditions.commits
    return format_of(dtype, conditions.state_format, moving=moving, ema=conditions.averages)


def units_on(tier: Tier, plan: Plan, sizes: Sizes) -> list[UnitSizes]:
    """Return the units whose parameters a plan puts on ``tier``."""
    units, default = plan.parameter_units, plan.parameters  # as plan.tier_of, which takes longer
    return [unit for unit in sizes.units if units.get(unit.name, default) is tier]


def is_whole(plan: Plan, sizes: Sizes, conditions: Conditions) -> bool:
    """Return whether one rank computes with its parameters in place: nothing is sharded."""
    in_place = {Tier.DEVICE, conditions.compute_tier}
    return sizes.ranks == 1 and {plan.tier_of(unit.name) for unit in sizes.units} <= in_place


def _parameters(plan: Plan, sizes: Sizes, conditions: Conditions) -> Iterable[Item]:
    """Return parameters on the tiers they live on, and the buffers they are computed from."""
    compute = conditions.compute_tier
    by_tier = {tier: units_on(tier, plan, sizes) for tier in Tier}
    on_disk = by_tier[Tier.DISK]
    yield Item(compute, "parameters", _share(by_tier[Tier.DEVICE]))
    yield Item(Tier.HOST, "parameters", stored_bytes(plan, by_tier[Tier.HOST]))
    yield Item(Tier.DISK, "parameters", stored_bytes(plan, on_disk))
    purpose = "parameters from disk, in memory" if on_disk else "parameters that are decoded"
    yield Item(Tier.HOST, purpose, in_memory_bytes(plan, sizes))
    whole = is_whole(plan, sizes, conditions)
    in_place = sizes.ranks == 1 and conditions.device_is_host
    if not whole and not in_place:
        yield Item(compute, "unsharded parameters", _unsharded(plan, sizes))
    if plan.ordered_reduce is not None and sizes.ranks > 1:
        most = max((unit.gradient_bytes for unit in sizes.units), default=0)
        yield Item(compute, "gradients of other ranks", sizes.ranks * most)
    if conditions.device_is_host:
        return
    # Frozen parameters have no copy: no update writes them.
    written = sum(unit.gradient_bytes for unit in by_tier[Tier.DEVICE])
    if not reaches_host(plan.update_on) and not conditions.commits:
        # No update writes fp32 weights to host memory then: their pages are never touched.
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


def in_memory_bytes(plan: Plan, sizes: Sizes) -> int:
    """Return the host memory, in bytes, for units on disk, or decoded ones, while they are used."""
    pool, (pooled, around) = plan.weight_ram_budget, _pooled(plan, sizes)
    if not pooled:
        return 0
    most = most_in_memory(pooled, plan.prefetch, around) if pool is None else int(pool)
    return min(most, sum(round_up(nbytes, ALIGN) for nbytes in pooled))


def pooled_bytes(plan: Plan, sizes: Sizes) -> int:
    """Return the bytes of all units on disk, and of decoded ones, in buffers."""
    return sum(_pooled(plan, sizes)[0])


def stored_bytes(plan: Plan, units: Iterable[UnitSizes]) -> int:
    """Return the bytes of units where they are stored, of which codes stay codes under stage 3."""
    return sum(unit.stored_bytes if plan.stage == 3 else unit.share_bytes for unit in units)


def _pooled(plan: Plan, sizes: Sizes) -> tuple[list[int], int]:
    """Return the bytes of the buffers of units on disk and of decoded ones, and those around."""
    on_disk = units_on(Tier.DISK, plan, sizes)
    decoded = [u.decoded_bytes for u in units_on(Tier.HOST, plan, sizes) if u.decoded_bytes]
    buffers = [unit.buffer_bytes for unit in on_disk]
    return [*buffers, *(decoded if plan.stage == 3 else ())], bytes_around(on_disk)


def _unsharded(plan: Plan, sizes: Sizes) -> int:
    """Return the bytes of parameters that are unsharded at once."""
    if plan.stage < 3:
        return sizes.whole_bytes
    lasting = sum(unit.whole_bytes for unit in sizes.units if unit.name in plan.unsharded)
    passing = UNITS_UNSHARDED * max((unit.whole_bytes for unit in sizes.units), default=0)
    passing += sizes.ranks * bytes_around(sizes.units)
    return min(lasting + passing, sizes.whole_bytes) if lasting else passing


def _gradients(plan: Plan, sizes: Sizes, conditions: Conditions) -> Iterable[Item]:
    """Return gradients of this rank's share, on the tier where they wait for their update.

    The sum over several micro-batches is fp32, in vertical order too, and if ranks' are added one
    by one. Below stage 2, the average of such sums is.
    """
    several = plan.accumulation_steps > 1
    wide = plan.micro_batches > 1 or (plan.ordered_reduce is not None and sizes.ranks > 1)
    wide |= several and plan.stage <= 1 and not is_whole(plan, sizes, conditions)
    in_backward = not plan.timing.allows_clipping
    away = not conditions.device_is_host
    units: Sequence[UnitSizes] = sizes.units
    on_device = units_on(Tier.DEVICE, plan, sizes) if away else []
    if on_device and (in_backward or reaches_device(plan.update_on)):
        # Backward does not wait for these updates: if they are slower, all gradients may wait.
        yield Item(Tier.DEVICE, "gradients", _waiting(on_device, wide=several or wide))
        units = [unit for unit in units if plan.tier_of(unit.name) != Tier.DEVICE]
        if not any(unit.trained for unit in units):
            return
    once, sums = _waiting(units, wide=wide), _waiting(units, wide=True)
    waiting = sums if several else once
    if in_backward and not several and not on_device:
        # Backward waits for updates. (With several micro-batches, updates begin in the last.)
        most = max((_waiting([unit], wide=wide) for unit in units), default=0)
        arriving = MAX_IN_FLIGHT_BYTES + most if away else 0
        waiting = min(waiting, window_of(most if away else 0) + most + arriving)
    yield Item(Tier.HOST, "gradients", waiting)
    if not away:
        return
    if several and sums > once:
        # Gradients of the first micro-batch are copied to pinned memory that is never freed.
        yield Item(Tier.HOST, "gradients of the first micro-batch", once)
    if several:
        yield Item(Tier.HOST, "buffers for gradients", PIECE_BUFFERS * PIECE_BYTES)
    # During backward no more gradients leave than may wait for their updates.
    leaving = once if several else min(once, waiting)
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
    if plan.timing.can_undo:
        on_disk = sum(unit.gradient_bytes for unit in units_on(Tier.DISK, plan, sizes))
        trained = sum(unit.gradient_bytes for unit in sizes.units)
        yield Item(Tier.HOST, "old weights", trained - on_disk)
        yield Item(Tier.DISK, "old weights", on_disk)
    yield Item(Tier.HOST, "ring of states", memory.ring_bytes)
    yield from _on_the_link(plan, sizes, conditions)
    if conditions.commits:
        frozen = sizes.share_bytes - sum(unit.gradient_bytes for unit in sizes.units)
        # ``file_bytes`` has every place of a chunk, and a commit keeps one of them.
        places = 2 if plan.timing.can_undo else 1
        chunks = memory.file_bytes // places
        yield Item(Tier.DISK, "two commits", 2 * (chunks + max(frozen, 0)))
        yield Item(Tier.DISK, "updates that may be undone", (places - 1) * chunks)
    else:
        yield Item(Tier.DISK, "states", memory.file_bytes)


def _on_the_link(plan: Plan, sizes: Sizes, conditions: Conditions) -> Iterable[Item]:
    """Return the buffers for gradients and states of parameters on an accelerator.

    They hold any chunk: which chunks the device updates makes no difference.
    """
    if conditions.device_is_host or not units_on(Tier.DEVICE, plan, sizes):
        return
    counts: dict[torch.dtype, list[int]] = {}
    on_device: dict[torch.dtype, list[bool]] = {}
    for unit in sizes.units:
        tier = plan.tier_of(unit.name)
        if tier == Tier.DISK:
            continue
        for dtype, elements in unit.by_dtype.items():
            counts.setdefault(dtype, []).extend(elements)
            on_device.setdefault(dtype, []).extend([tier == Tier.DEVICE] * len(elements))
    families = _families(sizes, plan, conditions)
    lines = tuple((families[d], tuple(n), tuple(on_device[d])) for d, n in counts.items())
    policy = PipelinePolicy()
    # Chunks in host memory are larger here: Python sends the gradients of each one.
    chunk = policy.linked_chunk if plan.states == Tier.HOST else policy.chunk
    staged, slots = _buffers_of(lines, chunk)
    if reaches_host(plan.update_on):
        yield Item(Tier.HOST, "buffers for gradients of chunks", staged)
    if reaches_device(plan.update_on):
        yield Item(Tier.DEVICE, "buffers for states", slots)


@lru_cache(maxsize=256)
def _buffers_of(
    lines: tuple[tuple[Family, tuple[int, ...], tuple[bool, ...]], ...], chunk_elements: int
) -> tuple[int, int]:
    """Return the buffer bytes for gradients of chunks on the host, and for states on the device.

    ``lines``: each family, the elements of its parameters, and which of them are on the device.
    """
    counts: dict[tuple[Family, int], int] = {}
    for line, elements, on_device in lines:
        for family, chunk, count in chunks_of([(line, elements)], chunk_elements):
            if any(on_device[run.parameter] for run in chunk.runs):
                kind = (family, chunk.elements)
                counts[kind] = counts.get(kind, 0) + count
    chunks: list[tuple[Family, int]] = []
    for kind, count in counts.items():
        chunks += min(count, _most_slots(kind[1])) * [kind]
    slots, nbytes = device_slots(chunks)
    return plan_staging([elements for _, elements in chunks]).nbytes, slots * nbytes


def _most_slots(elements: int) -> int:
    """Return the most slots that chunks of ``elements`` ever use; more chunks need no more."""
    staged = DEFAULT_STAGING_BYTES // (torch.float32.itemsize * elements)
    return max(LEAST_SLOTS, MOST_DEVICE_SLOTS, staged)


def _share(units: Sequence[UnitSizes]) -> int:
    return sum(unit.share_bytes for unit in units)
