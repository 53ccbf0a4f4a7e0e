"""The bytes of states in RAM, in the ring and on disk, and the chunks that stay in RAM."""

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
"""Slots of device memory: one chunk goes up, one is updated and one comes down at once."""
_DEVICE_ALIGN = 128
AlikeChunks = tuple[Family, ChunkPlan, int]
"""A chunk, and the number of consecutive chunks of its size."""


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
    """The bytes on disk that steps use, alignment included."""
    ring_bytes: int
    """Host memory that states on disk pass through; does not grow with the model."""
    host_weight_bytes: int = 0
    """A copy in host memory of the weights on an accelerator, aligned. With ``DelayedUpdate`` and
    ``overlap="speculative"``, copies of all weights too."""
    staging_bytes: int = 0
    """Host memory that gradients from an accelerator pass through; does not grow with the model."""
    gradient_bytes: int = 0
    """Peak bytes of gradients that updates still read, during backward or with
    ``DelayedUpdate``."""
    device_bytes: int = 0
    """An accelerator's memory for states that it updates."""
    pinned_bytes: int = 0
    """The part of host memory that is pinned for an accelerator; see TENSORSTOW_PINNED_LIMIT."""

    @property
    def host_bytes(self) -> int:
        """Return the host memory that states and buffers hold."""
        return self.ram_bytes + self.ring_bytes + self.host_weight_bytes + self.staging_bytes


@dataclass(frozen=True, slots=True)
class StagingPlan(RingPlan):
    """The host memory for copies of gradients: ``slots`` of one chunk's gradients each."""

    def offset(self, slot: int, position: int) -> int:
        """Return the offset in a slot of the gradient at ``position`` of its chunk."""
        return slot * self.slot_bytes + position * _WIDEST


def plan_staging(elements: Sequence[int]) -> StagingPlan:
    """Return the staging memory for chunks of ``elements``: one slot each, up to 64 MiB.

    It has at least two slots, so that one chunk's gradients are copied while another's are used. A
    slot holds the largest chunk's gradients in fp32, whatever their dtype.
    """
    slot = round_up(_WIDEST * max(elements, default=0), _PAGE)
    fitting = max(LEAST_SLOTS, DEFAULT_STAGING_BYTES // max(slot, 1))
    return StagingPlan(min(fitting, len(elements)), slot)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The division of a RAM budget: a ring, and the number of first chunks that stay in RAM."""

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

    The ring comes first; the rest of the budget buys chunks from the first on. Backward produces
    their gradients last, and the next forward needs their weights first, so nothing hides their
    transfers. The first ``at_home`` chunks are in RAM already and take no budget.
    """
    widths = [slot_bytes(f, p.elements, with_weights=with_weights) for f, p, _ in chunks]
    slot, total = max(widths, default=0), sum(count for *_, count in chunks)
    ring = plan_ring(slot, total, budget=budget, slots=slots)
    left = 0 if budget is None else budget - ring.nbytes
    resident = 0
    for family, plan, count in chunks:
        passed = min(at_home, count)
        at_home -= passed
        nbytes, movable = family.state_bytes(plan.elements), count - passed
        bought = min(movable, left // nbytes)
        resident += bought
        left -= bought * nbytes
        # The chunks that stay are the first ones: a later one that would still fit does not count.
        if bought < movable:
            break
    # A commit also writes the chunks that stay, through the ring.
    moving = total if with_weights else total - resident
    return HostPlan(plan_ring(slot, moving, budget=budget, slots=slots), resident)


def predict_memory(
    lines: Sequence[tuple[Family, Sequence[int]]],
    *,
    chunk_elements: int,
    disk_fraction: float = 1.0,
    durable: bool = False,
    budget: int | None = None,
    slots: int | None = None,
) -> StateMemory:
    """Predict the memory of the states of a model.

    Args:
        lines: Parameters that share chunks: their family, and the elements of each. Parameters
            whose units are on disk have a line for each unit.
        chunk_elements: Elements of a chunk (``PipelinePolicy.chunk_elements``).
        disk_fraction: The share of each line's elements whose states are on disk.
        durable: Whether commits store them: then chunks on disk hold all states, each followed by
            its weights, and ``disk_fraction`` is 0 or 1.
        budget: Host memory for the ring and for states that stay, in bytes; None: the ring's own.
        slots: Limit of the ring for a schedule that uses fewer (``PipelinePolicy.most_slots``).
    """
    in_ram, chunks = 0, []
    for family, sizes in lines:
        group = max(spec.per for spec in family.specs)
        if not durable:
            ram, _ = split(sizes, disk_fraction, group=group)
            in_ram += sum(family.state_bytes(part.stop - part.start) for part in ram)
        # With commits all chunks are cut alike, because those in RAM are written too.
        fraction = 1.0 if durable else disk_fraction
        chunks += [
            (family, *piece) for piece in _cut(tuple(sizes), chunk_elements, fraction, group)
        ]
    at_home = sum(count for *_, count in chunks) if durable and not disk_fraction else 0
    host = plan_host(chunks, budget=budget, slots=slots, with_weights=durable, at_home=at_home)
    resident = at_home + host.resident
    bought = moving = stored = 0
    for family, plan, count in chunks:
        staying = min(resident, count)
        resident -= staying
        nbytes = chunk_state_bytes(family, plan)
        bought += staying * nbytes
        moving += (count - staying) * nbytes
        # A commit also writes the chunks that stay in RAM.
        on_disk = count if durable else count - staying
        stored += on_disk * chunk_bytes(family, plan.elements, with_weights=durable)
    return StateMemory(
        logical_bytes=in_ram + bought + moving,
        ram_bytes=in_ram + bought,
        disk_bytes=moving,
        file_bytes=stored,
        ring_bytes=host.ring.nbytes,
    )


def chunks_of(
    lines: Sequence[tuple[Family, Sequence[int]]], chunk_elements: int
) -> list[AlikeChunks]:
    """Return the chunks of a whole model's states; ``lines`` as ``predict_memory`` takes them."""
    chunks: list[AlikeChunks] = []
    for family, sizes in lines:
        chunks += [(family, *piece) for piece in _cut(tuple(sizes), chunk_elements)]
    return chunks


@lru_cache(maxsize=256)  # layers of deep models are alike, and so are plans that are compared
def _cut(
    sizes: tuple[int, ...], chunk_elements: int, disk_fraction: float = 1.0, group: int = 1
) -> tuple[tuple[ChunkPlan, int], ...]:
    """Return the chunks of one line, and how many are alike."""
    _, disk = split(sizes, disk_fraction, group=group)
    return tuple(cut_alike(lay_out(disk), chunk_elements))


def device_slots(chunks: Sequence[tuple[Family, int]]) -> tuple[int, int]:
    """Return the number of slots for states in an accelerator's memory, and a slot's bytes.

    ``chunks``: the family and the elements of each chunk that the accelerator may update.
    """
    widest = max((parts_of(family, n)[-1].file_at for family, n in chunks), default=0)
    return min(MOST_DEVICE_SLOTS, len(chunks)), round_up(widest, _DEVICE_ALIGN)


def chunk_state_bytes(family: Family, plan: ChunkPlan) -> int:
    """Return the bytes of states in a chunk, padding excluded."""
    return sum(family.state_bytes(run.count) for run in plan.runs)
