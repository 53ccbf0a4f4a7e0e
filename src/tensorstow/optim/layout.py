"""Where every element of the optimizer states goes: pure arithmetic over sizes.

The parameters of one family (same dtype, same state streams) are laid one after the other in two
flat spaces, one in RAM and one on disk; a space is cut every ``capacity`` elements. So a chunk
holds several small parameters or a piece of a large one, and moves as one run of bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from tensorstow.base.errors import BudgetError, DTypeError, OptionError
from tensorstow.base.sizes import format_bytes

LANE = 16
"""A parameter begins at a multiple of this many elements: one vector register of fp32."""
STATE_BYTES = 4
"""States are fp32."""
IO_ALIGN = 4096
RESIDENT_CAPACITY = 16 << 20
"""Elements in one resident chunk: some 8 ms of updating, so that starting one costs nothing, and
less than the ring takes to fill, so that no read waits for it."""
STREAM_STAGGER = 3 * IO_ALIGN
"""Between streams in a slot, so that they never sit a power of two apart."""
LEAST_SLOTS = 2
DEFAULT_RING_BYTES = 48 << 20


STATE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Parameters that a kernel takes."""


def refuse_dtype(dtype: torch.dtype, name: str) -> NoReturn:
    """Raise DTypeError for a parameter that no kernel takes."""
    message = (
        f"{name} has dtype {dtype}: the kernels take float32, bfloat16 and float16. Cast it, or"
        " leave it to torch.optim."
    )
    raise DTypeError(message)


@dataclass(frozen=True, slots=True)
class Family:
    """Parameters whose states have the same streams."""

    dtype: torch.dtype
    amsgrad: bool

    def __post_init__(self) -> None:
        """Refuse dtypes that no kernel takes."""
        if self.dtype not in STATE_DTYPES:
            refuse_dtype(self.dtype, "A parameter")

    @property
    def streams(self) -> tuple[str, ...]:
        """Return the names of the states, in the order in which a chunk stores them."""
        names = ["exp_avg", "exp_avg_sq"]
        if self.amsgrad:
            names.append("max_exp_avg_sq")
        if self.dtype != torch.float32:
            names.append("master")
        return tuple(names)


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` elements of a parameter, from ``start`` of it, at ``position`` of a space."""

    parameter: int
    start: int
    count: int
    position: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One cut of a space: runs with positions relative to it, and its length in elements."""

    runs: tuple[Run, ...]
    elements: int


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a parameter."""

    parameter: int
    start: int
    stop: int


def split(sizes: Sequence[int], disk_fraction: float) -> tuple[list[Span], list[Span]]:
    """Share the elements of ``sizes`` between RAM and disk, in order: the head stays in RAM.

    The disk gets ``round(disk_fraction * sum(sizes))`` elements exactly, so at most one parameter
    is split. Returns (RAM, disk).
    """
    if not 0.0 <= disk_fraction <= 1.0:
        message = (
            f"A fraction of {disk_fraction} on disk was asked for: it lies between 0 (all in RAM)"
            " and 1 (all on disk)."
        )
        raise OptionError(message)
    ram_elements = sum(sizes) - round(disk_fraction * sum(sizes))
    ram: list[Span] = []
    disk: list[Span] = []
    for parameter, size in enumerate(sizes):
        kept = min(size, ram_elements)
        ram_elements -= kept
        if kept:
            ram.append(Span(parameter, 0, kept))
        if kept < size:
            disk.append(Span(parameter, kept, size))
    return ram, disk


def lay_out(spans: Sequence[Span]) -> list[Run]:
    """Place ``spans`` one after the other, each at a multiple of LANE."""
    runs = []
    position = 0
    for span in spans:
        runs.append(Run(span.parameter, span.start, span.stop - span.start, position))
        position += round_up(span.stop - span.start, LANE)
    return runs


def space_elements(runs: Sequence[Run]) -> int:
    """Return the length of the space that ``runs`` fill, padding included."""
    return round_up(runs[-1].position + runs[-1].count, LANE) if runs else 0


def cut(runs: Sequence[Run], capacity: int) -> Iterator[ChunkPlan]:
    """Cut a space every ``capacity`` elements (a multiple of LANE)."""
    if capacity <= 0 or capacity % LANE:
        message = (
            f"Chunks of {capacity} elements were asked for: use a positive multiple of {LANE}."
        )
        raise OptionError(message)
    total = space_elements(runs)
    index = 0
    for begin in range(0, total, capacity):
        end = min(begin + capacity, total)
        while index < len(runs) and runs[index].position + runs[index].count <= begin:
            index += 1
        pieces = []
        for run in (runs[i] for i in range(index, len(runs))):
            low, high = max(run.position, begin), min(run.position + run.count, end)
            if run.position >= end:
                break
            if low < high:
                start = run.start + low - run.position
                pieces.append(Run(run.parameter, start, high - low, low - begin))
        yield ChunkPlan(tuple(pieces), end - begin)


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


def stream_bytes(elements: int) -> int:
    """Return the bytes that one stream of a chunk takes in a file."""
    return round_up(elements * STATE_BYTES, IO_ALIGN)


@dataclass(frozen=True, slots=True)
class RingPlan:
    """The buffers that chunks pass through: ``slots`` of ``slot_bytes``."""

    slots: int
    slot_bytes: int
    stream_stride: int

    @property
    def nbytes(self) -> int:
        """Return the host memory of the ring."""
        return self.slots * self.slot_bytes


def plan_ring(
    *, streams: int, chunk_elements: int, chunks: int, budget: int | None, slots: int | None = None
) -> RingPlan:
    """Fit slots into ``budget`` bytes (default DEFAULT_RING_BYTES), never more than ``chunks``.

    Raises BudgetError where not even LEAST_SLOTS slots fit.
    """
    stride = stream_bytes(chunk_elements) + STREAM_STAGGER
    slot = stride * streams
    if chunks == 0:
        return RingPlan(0, slot, stride)
    fitting = (DEFAULT_RING_BYTES if budget is None else budget) // slot
    if fitting < LEAST_SLOTS:
        asked = DEFAULT_RING_BYTES if budget is None else budget
        message = (
            f"A RAM budget of {format_bytes(asked)} was given: the ring needs at least"
            f" {LEAST_SLOTS} chunks of {format_bytes(slot)}, {format_bytes(LEAST_SLOTS * slot)}."
            " Raise ram_budget, or make chunks smaller (PipelinePolicy.chunk_elements)."
        )
        raise BudgetError(message)
    return RingPlan(min(fitting, chunks, slots or fitting), slot, stride)


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Bytes of optimizer states by place, and of the buffers between them."""

    logical_bytes: int
    """All states, padding excluded: 8 bytes per fp32 parameter under Adam."""
    ram_bytes: int
    """States that stay in RAM, padding excluded."""
    disk_bytes: int
    """States on disk, padding excluded."""
    file_bytes: int
    """The files on disk, alignment included."""
    ring_bytes: int
    """Host memory that the states on disk pass through; does not grow with the model."""

    @property
    def host_bytes(self) -> int:
        """Return the host memory that states and buffers hold."""
        return self.ram_bytes + self.ring_bytes


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
    ram, disk = split(sizes, disk_fraction)
    chunks = list(cut(lay_out(disk), chunk_elements))
    width = STATE_BYTES * len(family.streams)
    ring = plan_ring(
        streams=len(family.streams),
        chunk_elements=chunk_elements,
        chunks=len(chunks),
        budget=budget,
        slots=slots,
    )
    return StateMemory(
        logical_bytes=width * sum(sizes),
        ram_bytes=width * sum(s.stop - s.start for s in ram),
        disk_bytes=width * sum(s.stop - s.start for s in disk),
        file_bytes=len(family.streams) * sum(stream_bytes(c.elements) for c in chunks),
        ring_bytes=ring.nbytes,
    )
