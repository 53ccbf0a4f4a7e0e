"""Reads rows of parameters out of the store of one rank, block by block, and checks them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from tensorstow.base.errors import DamageError, OptionError
from tensorstow.checkpoint.stored_layout import StoredParameter, read_hyper, read_layout
from tensorstow.io.files import File
from tensorstow.states.layout import Family
from tensorstow.store.checksums import block_checksums, weight_checksums
from tensorstow.store.records import (
    ChunkShape,
    Generation,
    StreamShape,
    chunk_shapes,
    padded,
)
from tensorstow.store.tensors import read_tensor


def refuse_cut(name: str | None) -> NoReturn:
    """Raise OptionError for a parameter that cannot be cut into other rows."""
    message = (
        f"{name or 'A parameter'} of the run that is stored here is not cut into rows that another"
        " number of ranks can take: it is cut along another dimension, was committed by an older"
        ' version, has its dimensions in another order in memory, or has state_format="int8" and'
        " rows that no 32 divides. Start as many ranks as before; or save by"
        " torch.distributed.checkpoint there, and load that into a run in another directory"
        " (docs/guides/saving-and-resuming.md)."
    )
    raise OptionError(message)


@dataclass(frozen=True, slots=True)
class Elements:
    """Consecutive elements of a parameter, with their states and weights, in memory."""

    shape: ChunkShape
    """Of the blocks that they are in."""
    memory: torch.Tensor
    """Those blocks, as in an extent."""
    position: int
    """Their place in the blocks."""
    count: int
    is_blank: bool
    """Their states are zero by definition."""
    family: Family

    def copy_to(self, shape: ChunkShape, memory: torch.Tensor, position: int) -> None:
        """Copy all streams to ``position`` of a chunk of ``shape`` in ``memory``."""
        for (stream, source), (_, target) in zip(
            _streams(self.shape), _streams(shape), strict=True
        ):
            if self.position % stream.per or position % stream.per:
                refuse_cut(None)
            first, at = source + stream.span(self.position), target + stream.span(position)
            nbytes = stream.span(self.count)
            memory[at : at + nbytes] = self.memory[first : first + nbytes]
        if self.is_blank:
            self._seed_masters(shape, memory, position)

    def _seed_masters(self, shape: ChunkShape, memory: torch.Tensor, position: int) -> None:
        """Give blank states, which other ones join in a chunk, the masters of their weights."""
        dtype = self.family.dtype
        for spec, (_, at) in zip(self.family.specs, _streams(shape), strict=False):
            if spec.name == "master" and spec.dtype == torch.float32:
                weights = self.memory[self.shape.weight_offset :].view(dtype)
                masters = memory[at : at + 4 * shape.elements].view(torch.float32)
                masters[position : position + self.count] = weights[self.position :][: self.count]


def _streams(shape: ChunkShape) -> Iterator[tuple[StreamShape, int]]:
    """Yield each stream of a chunk, the weights last, and where it begins."""
    at = 0
    for stream in (*shape.streams, shape.weight):
        yield stream, at
        at += padded(stream.span(shape.elements))


@dataclass(frozen=True, slots=True)
class _Run:
    start: int
    count: int
    chunk: int
    position: int


class RankReader:
    """A generation of one rank, read by parameter."""

    def __init__(self, files: Sequence[File], generation: Generation) -> None:
        """Read the layout; raise DamageError if it is impossible."""
        self.generation = generation
        self.layout = read_layout(generation)
        self.hyper = read_hyper(generation, len(self.layout.parameters))
        self._files = files
        self._shapes = chunk_shapes(generation.layout)
        self._records = {record.chunk: record for record in generation.chunks}
        self._tensors = {(record.kind, record.name): record for record in generation.tensors}
        self._runs: dict[int, list[_Run]] = {}
        for number, chunk in enumerate(self.layout.chunks):
            for run in chunk.plan.runs:
                found = _Run(run.start, run.count, number, run.position)
                self._runs.setdefault(run.parameter, []).append(found)

    def wholes(self) -> list[StoredParameter]:
        """Return the parameters with the shapes that they have on all ranks together."""
        return [_whole(parameter) for parameter in self.layout.parameters]

    def span(self, number: int) -> tuple[int, int]:
        """Return the first and the last + 1 of this rank's elements of a whole parameter."""
        parameter = self.layout.parameters[number]
        if parameter.rows is None or not parameter.shape[0]:
            return 0, parameter.elements
        start = parameter.rows[0] * (parameter.elements // parameter.shape[0])
        return start, start + parameter.elements

    def read(self, number: int, start: int, stop: int) -> Iterator[tuple[int, Elements]]:
        """Yield elements [start, stop) of this rank's part of a parameter, each with its place."""
        for run in self._runs.get(number, ()):
            first, end = max(start, run.start), min(stop, run.start + run.count)
            if first < end:
                position = run.position + first - run.start
                yield first, self._read_blocks(run.chunk, position, end - first)

    def read_tensor(self, kind: str, name: str) -> torch.Tensor:
        """Return a tensor that the generation has beside its chunks."""
        record = self._tensors[kind, name]
        return read_tensor(self._files[record.extent.file], record)

    def _read_blocks(self, chunk: int, position: int, count: int) -> Elements:
        """Read the blocks that have ``count`` elements of a chunk; check the sums of all."""
        shape, record = self._shapes[chunk], self._records[chunk]
        first, last = position // shape.block, -(-(position + count) // shape.block)
        begin = first * shape.block
        blocks = replace(shape, elements=min(shape.elements, last * shape.block) - begin)
        memory = torch.zeros(blocks.nbytes, dtype=torch.uint8, device="cpu")
        file = self._files[record.extent.file]
        places = list(zip(_streams(shape), _streams(blocks), strict=True))
        reads = []
        for (stream, there), (_, here) in places[-1:] if record.blank else places:
            nbytes = stream.span(blocks.elements)
            piece = memory[here : here + nbytes]
            reads.append(file.read(piece, record.extent.offset + there + stream.span(begin)))
        for read in reads:
            read.wait()
        sums = slice(4 * first, 4 * last)
        address = memory.data_ptr()
        weights = weight_checksums(blocks, address + blocks.weight_offset)
        is_intact = weights == record.weight_checksums[sums]
        if not record.blank:
            is_intact &= block_checksums(blocks, address) == record.checksums[sums]
        if not is_intact:
            message = (
                f"Chunk {chunk} was read from {file.path}, elements {begin} to"
                f" {begin + blocks.elements - 1} at offset {record.extent.offset}: they are not"
                " those that were written, their checksum does not fit. `tensorstow run scrub` says"
                " what else is damaged; go on from a snapshot, or from a checkpoint elsewhere."
            )
            raise DamageError(message)
        family = self.layout.chunks[chunk].family
        return Elements(blocks, memory, position - begin, count, record.blank, family)


def _whole(parameter: StoredParameter) -> StoredParameter:
    if not parameter.is_sharded:
        return parameter
    if parameter.rows is None or parameter.order is not None:
        refuse_cut(parameter.name)
    shape = (parameter.rows[1], *parameter.shape[1:])
    return replace(parameter, shape=shape, rows=None, is_sharded=False)
