"""The place of every element of the states, chunk by chunk: arithmetic over sizes.

The parameters of one family (same dtype, same state streams) are laid one after the other in two
flat spaces, one in RAM and one on disk; a space is cut every ``capacity`` elements. So a chunk
holds several small parameters or a piece of a large one. It is read and written as one range of
bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple, NoReturn

import torch

import tensorstow._native as _native
from tensorstow.base.errors import BudgetError, DTypeError, OptionError
from tensorstow.base.sizes import format_bytes, round_up
from tensorstow.formats.state_format import StateFormat, StreamSpec, state_names, streams_of

LANE = 32
"""A parameter begins at a multiple of this many elements: two vector registers of fp32, and one
group of those that share a scale under int8."""
DEFAULT_CHUNK = 1 << 19
LINKED_CHUNK = 1 << 21
"""Elements in one chunk whose gradients Python sends over a link, some 0.2 ms of Python. An H100
with 16 cores took 0.35 s for a step with 2^19 elements, 0.30 with 2^21, and 0.29 with 2^23."""
RESIDENT_CAPACITY = 16 << 20
"""Elements in one resident chunk: some 8 ms of updating, so that starting one costs nothing, and
less than the ring takes to fill, so that no read waits for it."""
LEAST_SLOTS = 2
DEFAULT_RING_BYTES = 48 << 20
DEFAULT_SMALL_BYTES = 64 << 20
"""Bytes of the slots of small chunks."""
LARGEST_SMALL = 256 << 10
"""Bytes of a slot that is small."""
STREAMS = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "master",
    "exp_avg_scale",
    "exp_avg_sq_scale",
    "ema",
)
"""All streams of states, in the order of the kernels' arguments."""
STATE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Parameters that a kernel takes."""


def refuse_dtype(dtype: torch.dtype, name: str) -> NoReturn:
    """Raise DTypeError for a parameter that no kernel can update."""
    message = (
        f"{name} has dtype {dtype}: the kernels take float32, bfloat16 and float16. Cast it, or"
        " leave it to torch.optim."
    )
    raise DTypeError(message)


class OptionalStates(NamedTuple):
    """The states beyond both moments that a parameter group asks for."""

    amsgrad: bool
    ema: bool = False

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "OptionalStates":
        """Return those that the options of ``group`` ask for."""
        return cls(bool(group.get("amsgrad")), group.get("ema") is not None)


@dataclass(frozen=True, slots=True)
class Family:
    """Parameters whose states have the same streams."""

    dtype: torch.dtype
    amsgrad: bool
    format: StateFormat = StateFormat.FP32
    ema: bool = False

    def __post_init__(self) -> None:
        """Raise DTypeError for dtypes that no kernel can update."""
        if self.dtype not in STATE_DTYPES:
            refuse_dtype(self.dtype, "A parameter")

    @property
    def specs(self) -> tuple[StreamSpec, ...]:
        """Return the streams of a chunk, in the order in which it stores them."""
        return streams_of(self.dtype, self.format, amsgrad=self.amsgrad, ema=self.ema)

    def check(self) -> None:
        """Raise OptionError for states that the format cannot store."""
        streams_of(self.dtype, self.format, amsgrad=self.amsgrad, ema=self.ema)

    @property
    def optional(self) -> OptionalStates:
        """Return which states it has beyond both moments."""
        return OptionalStates(self.amsgrad, self.ema)

    @property
    def has_master(self) -> bool:
        """Return whether states have fp32 masters, because the weights are 16-bit."""
        return self.dtype != torch.float32

    @property
    def states(self) -> tuple[str, ...]:
        """Return the names of the states that users see."""
        return state_names(self.dtype, amsgrad=self.amsgrad, ema=self.ema)

    @property
    def native(self) -> tuple[str, str, bool, bool]:
        """Return the family in the native core's notation."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype, str(self.format), self.amsgrad, self.ema

    def state_bytes(self, elements: int) -> int:
        """Return the bytes of the states of ``elements``, padding excluded."""
        return _state_bytes(self, elements)


@lru_cache(maxsize=1 << 16)
def _state_bytes(family: Family, elements: int) -> int:
    return sum(spec.nbytes(elements) for spec in family.specs)


@dataclass(frozen=True, slots=True)
class Segment:
    """``count`` elements of a parameter from ``start`` on, at ``position`` of a chunk or space."""

    parameter: int
    start: int
    count: int
    position: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The segments of one chunk, with positions relative to it, and its length in elements."""

    runs: tuple[Segment, ...]
    elements: int


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Elements [start, stop) of a parameter."""

    parameter: int
    start: int
    stop: int


def split(
    sizes: Sequence[int], disk_fraction: float, *, group: int = 1
) -> tuple[list[ElementRange], list[ElementRange]]:
    """Share the elements of ``sizes`` between RAM and disk, in order: the head stays in RAM.

    The disk gets ``round(disk_fraction * sum(sizes))`` elements exactly, so at most one parameter
    is split; or up to ``group`` elements more, so that no group that shares a scale is. Returns
    (RAM, disk).
    """
    if not 0.0 <= disk_fraction <= 1.0:
        message = (
            f"A fraction of {disk_fraction} on disk was requested: it lies between 0 (all in RAM)"
            " and 1 (all on disk)."
        )
        raise OptionError(message)
    ram_elements = sum(sizes) - round(disk_fraction * sum(sizes))
    ram: list[ElementRange] = []
    disk: list[ElementRange] = []
    for parameter, size in enumerate(sizes):
        head = min(size, ram_elements)
        ram_elements -= head
        if head < size:
            head -= head % group  # a group has one scale: its elements stay together
        if head:
            ram.append(ElementRange(parameter, 0, head))
        if head < size:
            disk.append(ElementRange(parameter, head, size))
    return ram, disk


def lay_out(spans: Sequence[ElementRange]) -> list[Segment]:
    """Place ``spans`` one after the other, each at a multiple of LANE."""
    runs = []
    position = 0
    for span in spans:
        runs.append(Segment(span.parameter, span.start, span.stop - span.start, position))
        position += round_up(span.stop - span.start, LANE)
    return runs


def space_elements(runs: Sequence[Segment]) -> int:
    """Return the length of the space that ``runs`` fill, padding included."""
    return round_up(runs[-1].position + runs[-1].count, LANE) if runs else 0


def cut(runs: Sequence[Segment], capacity: int) -> Iterator[ChunkPlan]:
    """Cut a space every ``capacity`` elements (a multiple of LANE)."""
    for plan, count in cut_alike(runs, capacity):
        yield plan
        for number in range(1, count):
            first = plan.runs[0]
            start = first.start + number * capacity
            yield ChunkPlan((Segment(first.parameter, start, capacity, 0),), capacity)


def cut_alike(runs: Sequence[Segment], capacity: int) -> Iterator[tuple[ChunkPlan, int]]:
    """Cut a space every ``capacity`` elements; yield chunks of one large parameter together.

    With each chunk comes the number of consecutive chunks of its size: more than one only if each
    has ``capacity`` elements of one parameter and nothing else. Raises OptionError unless
    ``capacity`` is a positive multiple of LANE.
    """
    if capacity <= 0 or capacity % LANE:
        message = (
            f"Chunks of {capacity} elements were requested: use a positive multiple of {LANE}."
        )
        raise OptionError(message)
    total = space_elements(runs)
    begin = index = 0
    while begin < total:
        # These runs end before the chunk, and before all later ones: the space is cut in one pass.
        while index < len(runs) and runs[index].position + runs[index].count <= begin:
            index += 1
        run = runs[index] if index < len(runs) else None
        if run is not None and run.position <= begin:
            whole = (run.position + run.count - begin) // capacity
            if whole:  # these chunks differ in the segment's start alone
                first = Segment(run.parameter, run.start + begin - run.position, capacity, 0)
                yield ChunkPlan((first,), capacity), whole
                begin += whole * capacity
                continue
        end = min(begin + capacity, total)
        yield ChunkPlan(tuple(_pieces(runs, index, begin, end)), end - begin), 1
        begin = end


def _pieces(runs: Sequence[Segment], index: int, begin: int, end: int) -> Iterator[Segment]:
    """Yield the segments between two positions of a space, from the run at ``index`` on."""
    for number in range(index, len(runs)):
        run = runs[number]
        if run.position >= end:
            break
        low, high = max(run.position, begin), min(run.position + run.count, end)
        if low < high:
            start = run.start + low - run.position
            yield Segment(run.parameter, start, high - low, low - begin)


@dataclass(frozen=True, slots=True)
class Part:
    """The place of one stream of a chunk, or of its weights, in bytes."""

    width: int
    per: int
    """``width`` bytes for each ``per`` elements."""
    file_at: int
    """Offset from the chunk's place on disk."""
    slot_at: int
    """Offset from the beginning of a slot of the ring."""
    nbytes: int
    """Bytes, padded to whole disk blocks."""


@lru_cache(maxsize=1024)
def parts_of(family: Family, elements: int, *, is_small: bool = False) -> tuple[Part, ...]:
    """Return the parts of a chunk of ``elements``: each stream, then its weights.

    Computed by the native core; [Note: Extents] in csrc/pipeline/chunk.h.
    """
    return tuple(Part(*row) for row in _native.chunk_layout(family.native, elements, is_small))


_LEAST_FILLED = 0.75
_MOST_ROW_CHUNKS = 1 << 14


@dataclass(frozen=True, slots=True)
class RowChunks:
    """The group of chunks of one parameter that are cut between its rows."""

    elements: int
    """Elements of each chunk."""
    parameter: int
    """Tells it from other parameters' groups."""

    @classmethod
    def of(cls, family: Family, size: int, row: int, largest: int, parameter: int) -> "RowChunks":
        """Return those of a parameter of ``size`` elements, of at most ``largest`` each.

        They have as few rows as possible, if three quarters of their bytes on disk are states: what
        is read and written is whole disk blocks. Rows that are larger than that are cut evenly.
        """
        unit = lcm(row, LANE)
        if unit >= largest:
            pieces = range(-(-row // largest), row // LANE + 1)
            even = (row // n for n in pieces if row % n == 0 and row // n % LANE == 0)
            # A row without such a divisor is cut every ``largest`` elements.
            return cls(next(even, largest), parameter)
        count = max(1, -(-size // (unit * _MOST_ROW_CHUNKS)))
        while not _is_filled(family, unit * count) and unit * (count + 1) <= largest:
            count += 1
        return cls(unit * count, parameter)


def _is_filled(family: Family, elements: int) -> bool:
    nbytes = chunk_bytes(family, elements, with_weights=False)
    return family.state_bytes(elements) >= _LEAST_FILLED * nbytes


def chunk_bytes(family: Family, elements: int, *, with_weights: bool) -> int:
    """Return the bytes on disk that a chunk takes, alignment included."""
    weight = parts_of(family, elements)[-1]
    return weight.file_at + (weight.nbytes if with_weights else 0)


def slot_bytes(family: Family, elements: int, *, with_weights: bool, is_small: bool = False) -> int:
    """Return the bytes of the ring that a chunk takes while it is in memory."""
    weight = parts_of(family, elements, is_small=is_small)[-1]
    return weight.slot_at + (weight.nbytes if with_weights else 0)


@dataclass(frozen=True, slots=True)
class RingPlan:
    """The buffers that chunks pass through: ``slots`` of ``slot_bytes``, then small ones."""

    slots: int
    slot_bytes: int
    small_slots: int = 0
    small_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Return the host memory of the ring."""
        return self.slots * self.slot_bytes + self.small_slots * self.small_bytes


def plan_small_slots(widths: Sequence[int], *, budget: int | None, slots: int | None) -> RingPlan:
    """Return a ring of small slots alone, one for each of ``widths``, and at most ``slots``.

    They have at most a quarter of ``budget``. The rows of a step are to fit in, for they stay there
    from forward to ``step()``.
    """
    most = DEFAULT_SMALL_BYTES if budget is None else min(DEFAULT_SMALL_BYTES, budget // 4)
    widest = max(widths, default=0)
    fitting = slots or max(LEAST_SLOTS, most // max(widest, 1))
    return RingPlan(0, 0, min(fitting, len(widths)), widest)


def plan_ring(slot: int, chunks: int, *, budget: int | None, slots: int | None = None) -> RingPlan:
    """Fit slots of ``slot`` bytes into ``budget``, never more than ``chunks``.

    The budget counts up to DEFAULT_RING_BYTES, which is also its default: what is beyond buys
    states that stay in RAM. Raises BudgetError where not even LEAST_SLOTS slots fit.
    """
    if chunks == 0:
        return RingPlan(0, slot)
    asked = DEFAULT_RING_BYTES if budget is None else budget
    # The least number of large slots may take more than the default.
    fitting = min(asked, max(DEFAULT_RING_BYTES, LEAST_SLOTS * slot)) // slot
    if fitting < LEAST_SLOTS:
        message = (
            f"A RAM budget of {format_bytes(asked)} was given: the ring needs at least"
            f" {LEAST_SLOTS} chunks of {format_bytes(slot)}, {format_bytes(LEAST_SLOTS * slot)}."
            " Raise ram_budget, or make chunks smaller (PipelinePolicy.chunk_elements)."
        )
        raise BudgetError(message)
    return RingPlan(min(fitting, chunks, slots or fitting), slot)
