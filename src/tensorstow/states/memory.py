"""The bytes of states in RAM, in the ring and on disk, and which chunks stay in RAM."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorstow.base.sizes import round_up
from tensorstow.states.layout import (
    LEAST_SLOTS,
    ChunkPlan,
    Family,
    RingPlan,
    chunk_bytes,
    cut,
    lay_out,
    plan_ring,
    slot_bytes,
    split,
)

DEFAULT_STAGING_BYTES = 64 << 20
_WIDEST = 4  # bytes of a gradient's element: fp32
_PAGE = 4096


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
    """The memory that gradients come down into: ``slots`` of one chunk's gradients each."""

    slots: int
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        """Return the host memory of all slots."""
        return self.slots * self.slot_bytes

    def offset(self, slot: int, position: int) -> int:
        """Return where a slot has the gradient of the element at ``position`` of its chunk."""
        return slot * self.slot_bytes + position * _WIDEST


def plan_staging(elements: Sequence[int]) -> StagingPlan:
    """Return the staging memory for chunks of ``elements``: one slot each, up to 64 MiB.

    Never fewer than two slots, so that one chunk's gradients come down while another's are used;
    every slot holds the largest chunk's in fp32, whatever their dtype.
    """
    slot = round_up(_WIDEST * max(elements, default=0), _PAGE)
    fitting = max(LEAST_SLOTS, DEFAULT_STAGING_BYTES // max(slot, 1))
    return StagingPlan(min(fitting, len(elements)), slot)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """How a RAM budget is spent: a ring, and how many chunks from the first on never move."""

    ring: RingPlan
    resident: int


def plan_host(
    chunks: Sequence[tuple[Family, ChunkPlan]],
    *,
    budget: int | None,
    slots: int | None = None,
    with_weights: bool = False,
    at_home: int = 0,
) -> HostPlan:
    """Share ``budget`` bytes between the ring and states that stay in RAM.

    The ring comes first; what is beyond it buys chunks from the first on: in backward their
    gradients land last, and the next forward needs their weights first, so their transfers are the
    ones that nothing hides. The first ``at_home`` chunks are not for sale: they have a place.
    """
    widths = [slot_bytes(f, p.elements, with_weights=with_weights) for f, p in chunks]
    slot = max(widths, default=0)
    ring = plan_ring(slot, len(chunks), budget=budget, slots=slots)
    left = 0 if budget is None else budget - ring.nbytes
    resident = 0
    movable = chunks[at_home:]
    for family, plan in movable:
        left -= family.state_bytes(plan.elements)
        if left < 0:
            break
        resident += 1
    # A commit writes what stays too, through the ring.
    moving = len(chunks) if with_weights else len(chunks) - resident
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
    """Return what one family of parameters with ``sizes`` elements will hold where.

    ``slots`` caps the ring where a schedule wants fewer than fit (``PipelinePolicy.most_slots``).
    """
    ram, disk = split(sizes, disk_fraction, group=max(spec.per for spec in family.specs))
    in_ram = sum(family.state_bytes(s.stop - s.start) for s in ram)
    chunks = [(family, plan) for plan in cut(lay_out(disk), chunk_elements)]
    return _sum_up(in_ram, chunks, plan_host(chunks, budget=budget, slots=slots))


def predict_whole(
    lines: Sequence[tuple[Family, Sequence[int]]],
    *,
    on_disk: bool,
    durable: bool,
    chunk_elements: int,
    budget: int | None = None,
) -> StateMemory:
    """Return what the states of a whole model will hold where.

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
    alike: dict[tuple[int, ...], list[ChunkPlan]] = {}  # deep models have many lines that are
    chunks = []
    for family, given in lines:
        sizes = tuple(given)
        if sizes not in alike:
            alike[sizes] = list(cut(lay_out(split(sizes, 1.0)[1]), chunk_elements))
        chunks += [(family, plan) for plan in alike[sizes]]
    at_home = 0 if on_disk else len(chunks)
    host = plan_host(chunks, budget=budget, with_weights=durable, at_home=at_home)
    kept = HostPlan(host.ring, at_home + host.resident)
    return _sum_up(0, chunks, kept, with_weights=durable)


def _sum_up(
    in_ram: int,
    chunks: Sequence[tuple[Family, ChunkPlan]],
    host: HostPlan,
    *,
    with_weights: bool = False,
) -> StateMemory:
    """Return the bytes by place; ``in_ram``: of states that are in no chunk of ``chunks``."""
    bought = sum(chunk_state_bytes(f, p) for f, p in chunks[: host.resident])
    moving = sum(chunk_state_bytes(f, p) for f, p in chunks[host.resident :])
    stored = chunks if with_weights else chunks[host.resident :]
    return StateMemory(
        logical_bytes=in_ram + bought + moving,
        ram_bytes=in_ram + bought,
        disk_bytes=moving,
        file_bytes=sum(chunk_bytes(f, p.elements, with_weights=with_weights) for f, p in stored),
        ring_bytes=host.ring.nbytes,
    )


def chunk_state_bytes(family: Family, plan: ChunkPlan) -> int:
    """Return the bytes of states in a chunk, padding excluded."""
    return sum(family.state_bytes(run.count) for run in plan.runs)
