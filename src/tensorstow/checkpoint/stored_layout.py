"""Reads the parameters, chunks and groups of a generation, and checks all of it first.

[Note: Bounds] in `store.bounds`. Native code writes to a parameter at the offsets that a chunk's
runs have, so runs must cover each parameter once, and nothing else.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, StoreFormatError
from tensorstow.base.sizes import round_up
from tensorstow.base.update_on import UpdateOn, is_update_on
from tensorstow.checkpoint.content import shape_of
from tensorstow.formats.state_format import StateFormat, stores_master
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import LANE, STATE_DTYPES, ChunkPlan, Family, Segment
from tensorstow.store.bounds import MOST_STEPS, check, check_whole, impossible
from tensorstow.store.records import MOST_ELEMENTS, Generation, chunk_shapes

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STATE_DTYPES}


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter of the stored run."""

    name: str | None
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    """The order of its dimensions in memory, as ``tensors.dtensor.order_of`` has it."""
    family: Family
    rows: tuple[int, int] | None = None
    """The first of its rank's rows, and the number of all rows; None: cut along other dimensions,
    or not at all."""
    is_sharded: bool = False

    @property
    def dtype(self) -> str:
        """Return its dtype as torch calls it, without the "torch."."""
        return str(self.family.dtype).removeprefix("torch.")

    @property
    def elements(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """The parameters of a generation, and the chunks that their states are in."""

    parameters: tuple[StoredParameter, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class StoredHyper:
    """The groups and steps of a generation."""

    groups: Sequence[Any]
    """As JSON; tensors are in records."""
    places: Mapping[int, tuple[int, int]]
    """The group of each parameter and its place in that group, by the parameter's number."""
    steps: Mapping[int, float]
    reseed: frozenset[int]
    update_on: UpdateOn


def altered(generation: Generation, detail: object) -> DamageError:
    """Return the error for a generation with something that this program never writes."""
    message = (
        f"Generation {generation.number} (step {generation.step}) was to be resumed, and no run of"
        f" this program has written it: {detail}. Nothing was changed. Resume another one"
        " (`tensorstow run inspect` prints them), or restore the directories from a copy that you"
        " trust."
    )
    return DamageError(message)


@contextmanager
def naming(generation: Generation) -> Iterator[None]:
    """Raise DamageErrors of the block as errors of ``generation``."""
    try:
        yield
    except DamageError as error:
        raise altered(generation, error) from error


def read_layout(generation: Generation) -> StoredLayout:
    """Return the layout; raise DamageError if impossible, StoreFormatError for other blocks."""
    shapes = chunk_shapes(generation.layout)
    blocks = {shape.block for shape in shapes} - {_native.UPDATE_BLOCK}
    if blocks:
        message = (
            f"The run that is stored here has checksums over {min(blocks)} elements each, and this"
            f" version takes {_native.UPDATE_BLOCK}. Resume it with the version that wrote it, save"
            " state_dict() there, and load that into a new run."
        )
        raise StoreFormatError(message)
    with naming(generation):
        entries = _list(generation.layout.get("parameters"), "the parameters", "the layout")
        parameters = tuple(_parameter(f"parameter {n}", entry) for n, entry in enumerate(entries))
        entries = _list(generation.layout["chunks"], "the chunks", "the layout")
        chunks = tuple(_chunk(f"chunk {n}", entry, parameters) for n, entry in enumerate(entries))
        for number, (chunk, shape) in enumerate(zip(chunks, shapes, strict=True)):
            is_ours = shape == shape_of(chunk)
            check(shape, "the streams", f"chunk {number}", is_possible=is_ours)
        _check_cover(parameters, chunks)
        numbers = sorted(record.chunk for record in generation.chunks)
        is_all = numbers == list(range(len(chunks)))
        check(numbers, "the chunks", "the generation", is_possible=is_all)
    return StoredLayout(parameters, chunks)


def read_hyper(generation: Generation, parameters: int) -> StoredHyper:
    """Return the groups and steps, of so many parameters; raise DamageError if impossible."""
    last = parameters - 1
    with naming(generation):
        hyper = _dict(generation.hyper, "the hyper-parameters", "the generation")
        groups = _list(hyper.get("groups"), "the groups", "the optimizer")
        members = _list(hyper.get("members"), "the parameters", "the groups")
        is_number = len(members) == len(groups)
        check(len(members), "the number", "the groups", is_possible=is_number)
        places: dict[int, tuple[int, int]] = {}
        for g, numbers in enumerate(members):
            for i, number in enumerate(_list(numbers, "the parameters", f"group {g}")):
                if number is not None:
                    check_whole(number, "a parameter", f"group {g}", 0, last)
                    is_new = number not in places
                    check(number, "a parameter", f"group {g}", is_possible=is_new)
                    places[number] = (g, i)
        counts = _dict(hyper.get("steps"), "the step counts", "the optimizer")
        steps = dict(_step_count(key, count, last) for key, count in counts.items())
        reseed = _list(hyper.get("reseed"), "the weights", "others")
        for number in reseed:
            check_whole(number, "a weight", "others", 0, last)
        update_on = hyper.get("update_on", "host")
        check(update_on, "the place", "updates", is_possible=is_update_on(update_on))
    return StoredHyper(groups, places, steps, frozenset(reseed), update_on)


def _step_count(key: str, count: object, last: int) -> tuple[int, float]:
    is_number = key.isascii() and key.isdecimal() and len(key) <= len(str(MOST_STEPS))
    # int() takes blanks, signs and digits of other scripts too.
    number = int(key) if is_number else -1
    check_whole(number, "a parameter", "step counts", 0, last)
    if type(count) not in {int, float} or not 0 <= count <= MOST_STEPS:  # type: ignore[operator]
        raise impossible(count, "the step count", f"parameter {number}")
    return number, float(count)  # type: ignore[arg-type]


def _parameter(whose: str, entry: object) -> StoredParameter:
    fields = _dict(entry, "the entry", whose)
    name, order = fields.get("name"), fields.get("order")
    is_name = name is None or type(name) is str
    check(name, "the name", whose, is_possible=is_name)
    shape = tuple(_list(fields.get("shape"), "the shape", whose))
    for count in shape:
        check_whole(count, "the shape", whose, 0, MOST_ELEMENTS)
    if order is not None:
        order = tuple(_list(order, "the order of dimensions", whose))
        is_order = {type(n) for n in order} == {int} and sorted(order) == [*range(len(shape))]
        check(order, "the order of dimensions", whose, is_possible=is_order)
    rows = fields.get("rows")
    if rows is not None:
        rows = tuple(_list(rows, "the rows", whose))
        is_rows = len(rows) == 2 and len(shape) > 0
        check(rows, "the rows", whose, is_possible=is_rows)
        check_whole(rows[1], "the number of rows", whose, 0, MOST_ELEMENTS)
        check_whole(rows[0], "the first row", whose, 0, rows[1] - shape[0])
    return StoredParameter(name, shape, order, _family(fields, whose), rows, "rows" in fields)


def _family(fields: Mapping[str, Any], whose: str) -> Family:
    dtype, kind, amsgrad = fields.get("dtype"), fields.get("format"), fields.get("amsgrad")
    ema = fields.get("ema", False)
    dtypes, formats = list(_DTYPES), list(StateFormat)
    check(dtype, "the dtype", whose, is_possible=dtype in dtypes)
    check(kind, "the format", whose, is_possible=kind in formats)
    family = Family(_DTYPES[str(dtype)], amsgrad is True, StateFormat(str(kind)), ema is True)
    # Inexact formats have no running maximum.
    is_possible = type(amsgrad) is bool and (family.format.exact or not amsgrad)
    check(amsgrad, "amsgrad", whose, is_possible=is_possible)
    is_possible = type(ema) is bool and (stores_master(family.dtype, family.format) or not ema)
    check(ema, "ema", whose, is_possible=is_possible)
    return family


def _chunk(whose: str, entry: object, parameters: Sequence[StoredParameter]) -> Chunk:
    fields = _dict(entry, "the entry", whose)
    runs = []
    end = 0
    for run in _list(fields.get("runs"), "the runs", whose):
        row = _list(run, "a run", whose)
        is_row = len(row) == len(("parameter", "start", "count", "position"))
        check(row, "a run", whose, is_possible=is_row)
        owner, start, count, position = row
        check_whole(owner, "a parameter", whose, 0, len(parameters) - 1)
        elements = parameters[owner].elements
        check_whole(count, "the elements of a run", whose, 1, elements)
        check_whole(start, "the start of a run", whose, 0, elements - count)
        # One after the other, each at the next multiple of LANE.
        place = round_up(end, LANE)
        check_whole(position, "the place of a run", whose, place, place)
        end = position + count
        runs.append(Segment(owner, start, count, position))
    elements = fields["elements"]
    check(elements, "the elements", whose, is_possible=elements == round_up(end, LANE))
    owners = [run.parameter for run in runs]
    families = {parameters[owner].family for owner in owners}
    is_one = len(families) == 1 and len(set(owners)) == len(owners)
    check(owners, "the parameters", whose, is_possible=is_one)
    return Chunk(ChunkPlan(tuple(runs), elements), families.pop())


def _check_cover(parameters: Sequence[StoredParameter], chunks: Sequence[Chunk]) -> None:
    """Raise DamageError unless the chunks have each element of each parameter once."""
    runs: dict[int, list[Segment]] = {number: [] for number in range(len(parameters))}
    for chunk in chunks:
        for run in chunk.plan.runs:
            runs[run.parameter].append(run)
    for number, segments in runs.items():
        segments.sort(key=lambda run: run.start)
        starts = [*(run.start for run in segments), parameters[number].elements]
        ends = [0, *(run.start + run.count for run in segments)]
        check(segments, "the runs", f"parameter {number}", is_possible=starts == ends)


def _list(value: object, field: str, whose: str) -> Sequence[Any]:
    # A generation that was not read from a file may have tuples.
    if isinstance(value, list | tuple):
        return value
    raise impossible(value, field, whose)


def _dict(value: object, field: str, whose: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise impossible(value, field, whose)
