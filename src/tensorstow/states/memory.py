"""The bytes of states in RAM, in the ring and on disk, and which chunks stay in RAM."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tensorstow.base.sizes import round_up
from tensorstow.states.layout import (
    LEAST_SLOTS,
    ChunkPlan,
    Family,
    RingPlan,
    chunk_bytes,
    cut_alike,
    lay_out,
    parts_of,
    plan_ring,
    slot_bytes,
    split,
)

DEFAULT_STAGING_BYTES = 64 << 20
_WIDEST = 4  # bytes of a gradient's element: fp32
_PAGE = 4096
MOST_DEVICE_SLOTS = 3
"""Of an accelerator's memory: one chunk goes up, one is updated and one comes down at once."""
_DEVICE_ALIGN = 128
AlikeChunks = tuple[Family, ChunkPlan, int]
"""A chunk, and how many there are of its size, one behind the other."""


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Bytes of optimizer states by place, and of the buffers between them."""

    logical_bytes: int
    """All states, padding excluded: 8 bytes per fp32 parameter under Adam."""
    ram_bytes: int
    """States that stay in RAM, padding excluded."""
    disk_bytes: int
    """States that are on disk alone, padding excluded."""
    file_bytes: int
    """One copy of what is on disk, alignment included."""
    ring_bytes: int
    """Host memory that states on disk pass through; does not grow with the model."""
    host_weight_bytes: int = 0
    """Weights of parameters on an accelerator, kept in host memory too: one copy, aligned."""
    staging_bytes: int = 0
    """Host memory that gradients from an accelerator pass through; does not grow with the model."""
    gradient_bytes: int = 0
    """Beside backward: the most that gradients held at once, of those that updates still read."""
    device_bytes: int = 0
    """An accelerator's memory that states pass through where they are updated there."""
    pinned_bytes: int = 0
    """Of the host memory: what is pinned for an accelerator; see TENSORSTOW_PINNED_LIMIT."""

    @property
    def host_bytes(self) -> int:
        """Return the host memory that states and buffers hold."""
        return self.ram_bytes + self.ring_bytes + self.host_weight_bytes + self.staging_bytes


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """The host memory for copies of gradients: ``slots`` of one chunk's gradients each."""

    slots: int
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        """Return the host memory of all slots."""
        return self.slots * self.slot_bytes

    def offset(self, slot: int, position: int) -> int:
        """Return the offset in a slot of the gradient at ``position`` of its chunk."""
        return slot * self.slot_bytes + position * _WIDEST


def plan_staging(elements: Sequence[int]) -> StagingPlan:
    """Return the staging memory for chunks of ``elements``: one slot each, up to 64 MiB.

    At least two slots, so that one chunk's gradients are copied while another's are used; a slot
    holds the largest chunk's gradients in fp32, whatever their dtype.
    """
    slot = round_up(_WIDEST * max(elements, default=0), _PAGE)
    fitting = max(LEAST_SLOTS, DEFAULT_STAGING_BYTES // max(slot, 1))
    return StagingPlan(min(fitting, len(elements)), slot)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """How a RAM budget is spent: on a ring, and on the first chunks, which then stay in RAM."""

    ring: RingPlan
    resident: int


def plan_host(
    chunks: Sequence[AlikeChunks],
    *,
    budget: int | None,
    slots: int | None = None,
    with_weights: bool = False,
    at_home: int = 0,
) -> HostPlan:
    """Share ``budget`` bytes between the ring and states that stay in RAM.

    The ring comes first; what is beyond it buys chunks from the first on: in backward their
    gradients come last, and the next forward needs their weights first, so their transfers are the
    ones that nothing hides. The first ``at_home`` chunks are not for sale: they have a place.
    """
    widths = [slot_bytes(f, p.elements, with_weights=with_weights) for f, p, _ in chunks]
    slot, total = max(widths, default=0), sum(count for *_, count in chunks)
    ring = plan_ring(slot, total, budget=budget, slots=slots)
    left = 0 if budget is None else budget - ring.nbytes
    resident = 0
    for family, plan, count in chunks:
        passed = min(at_home, count)
        at_home -= passed
        each, movable = family.state_bytes(plan.elements), count - passed
        bought = min(movable, left // each)
        resident += bought
        left -= bought * each
        if bought < movable:
            break
    # A commit writes what stays too, through the ring.
    moving = total if with_weights else total - resident
    return HostPlan(plan_ring(slot, moving, budget=budget, slots=slots), resident)


def predict_memory(
    sizes: Sequence[int],
    family: Family,
    *,
    disk_fraction: float,
    chunk_elements: int,
    budget: int | None = None,
    slots: int | None = None,
) -> StateMemory:
    """Predict the memory of one family of parameters with ``sizes`` elements.

    ``slots`` caps the ring where a schedule wants fewer than fit (``PipelinePolicy.most_slots``).
    """
    ram, disk = split(sizes, disk_fraction, group=max(spec.per for spec in family.specs))
    in_ram = sum(family.state_bytes(s.stop - s.start) for s in ram)
    chunks = [(family, *alike) for alike in cut_alike(lay_out(disk), chunk_elements)]
    return _sum_up(in_ram, chunks, plan_host(chunks, budget=budget, slots=slots))


def predict_whole(
    lines: Sequence[tuple[Family, Sequence[int]]],
    *,
    on_disk: bool,
    durable: bool,
    chunk_elements: int,
    budget: int | None = None,
) -> StateMemory:
    """Predict the memory of the states of a whole model.

    Args:
        lines: Parameters that share chunks: their family, and the elements of each. Those whose
            weights come from disk apart have a line for each unit.
        on_disk: Whether states are on disk, or all in RAM.
        durable: Whether commits take them: then they are in chunks on disk wherever they are, with
            the weights behind them.
        chunk_elements: Elements of a chunk (``PipelinePolicy.chunk_elements``).
        budget: Host memory for the ring and for states that stay, in bytes; None: the ring's own.
    """
    if not on_disk and not durable:
        held = sum(family.state_bytes(size) for family, sizes in lines for size in sizes)
        return _sum_up(held, [], plan_host([], budget=None))
    chunks = chunks_of(lines, chunk_elements)
    at_home = 0 if on_disk else sum(count for *_, count in chunks)
    host = plan_host(chunks, budget=budget, with_weights=durable, at_home=at_home)
    kept = HostPlan(host.ring, at_home + host.resident)
    return _sum_up(0, chunks, kept, with_weights=durable)


def chunks_of(
    lines: Sequence[tuple[Family, Sequence[int]]], chunk_elements: int
) -> list[AlikeChunks]:
    """Return the chunks of a whole model's states.

    Args:
        lines: As ``predict_whole`` takes them.
        chunk_elements: Elements of a chunk.
    """
    chunks: list[AlikeChunks] = []
    for family, given in lines:
        chunks += [(family, *each) for each in _cut(tuple(given), chunk_elements)]
    return chunks


@lru_cache(maxsize=256)  # layers of deep models are alike, and so are plans that are compared
def _cut(sizes: tuple[int, ...], chunk_elements: int) -> tuple[tuple[ChunkPlan, int], ...]:
    """Return the chunks of one line, and how many are alike."""
    return tuple(cut_alike(lay_out(split(sizes, 1.0)[1]), chunk_elements))


def device_slots(chunks: Sequence[tuple[Family, int]]) -> tuple[int, int]:
    """Return how many slots of an accelerator's memory states pass through, and a slot's bytes.

    Args:
        chunks: The family and the elements of each chunk that may be updated there.
    """
    widest = max((parts_of(family, n)[-1].file_at for family, n in chunks), default=0)
    return min(MOST_DEVICE_SLOTS, len(chunks)), round_up(widest, _DEVICE_ALIGN)


def _sum_up(
    in_ram: int,
    chunks: Sequence[AlikeChunks],
    host: HostPlan,
    *,
    with_weights: bool = False,
) -> StateMemory:
    """Return the bytes by place; ``in_ram``: of states that are in no chunk of ``chunks``."""
    bought = moving = stored = 0
    resident = host.resident
    for family, plan, count in chunks:
        kept = min(resident, count)
        resident -= kept
        nbytes = chunk_state_bytes(family, plan)
        bought += kept * nbytes
        moving += (count - kept) * nbytes
        on_disk = count if with_weights else count - kept
        stored += on_disk * chunk_bytes(family, plan.elements, with_weights=with_weights)
    return StateMemory(
        logical_bytes=in_ram + bought + moving,
        ram_bytes=in_ram + bought,
        disk_bytes=moving,
        file_bytes=stored,
        ring_bytes=host.ring.nbytes,
    )


def chunk_state_bytes(family: Family, plan: ChunkPlan) -> int:
    """Return the bytes of states in a chunk, padding excluded."""
    return sum(family.state_bytes(run.count) for run in plan.runs)
