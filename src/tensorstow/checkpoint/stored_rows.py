"""Reads rows of parameters out of the store of one rank, block by block, and checks them."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from tensorstow.base.errors import DamageError, OptionError
from tensorstow.checkpoint.stored_layout import StoredParameter, read_hyper, read_layout
from tensorstow.io.files import File, IoFuture
from tensorstow.store.checksums import block_checksums, weight_checksums
from tensorstow.store.records import (
    ChunkRecord,
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
class StoredPiece:
    """Consecutive elements of a parameter in a stored chunk, and the blocks that they are in."""

    file: File
    record: ChunkRecord
    shape: ChunkShape
    """The shape of the chunk."""
    position: int
    count: int

    @property
    def first_block(self) -> int:
        """Return the first block."""
        return self.position // self.shape.block

    @property
    def blocks(self) -> ChunkShape:
        """Return the shape of the blocks."""
        # Whole blocks, because a checksum is of one.
        begin, last = self.first_block * self.shape.block, self.position + self.count
        end = min(self.shape.elements, -(-last // self.shape.block) * self.shape.block)
        return replace(self.shape, elements=end - begin)

    def fits(self, position: int) -> bool:
        """Return whether it can begin at ``position``: groups that share a scale stay whole."""
        return all(
            position % stream.per == 0 and self.position % stream.per == 0
            for stream in self.shape.streams
        )

    def read(self, memory: torch.Tensor) -> "PieceRead":
        """Start reading the blocks into ``memory``, as in an extent."""
        blocks, begin = self.blocks, self.first_block * self.shape.block
        places = list(zip(_streams(self.shape), _streams(blocks), strict=True))
        if self.record.blank:
            # Only the weights of a blank chunk were written.
            memory[: blocks.weight_offset] = 0
            places = places[-1:]
        reads = []
        for (stream, source), (_, target) in places:
            part = memory[target : target + stream.span(blocks.elements)]
            reads.append(
                self.file.read(part, self.record.extent.offset + source + stream.span(begin))
            )
        return PieceRead(self, memory, reads)


@dataclass(frozen=True, slots=True)
class PieceRead:
    """A piece whose blocks are being read."""

    piece: StoredPiece
    memory: torch.Tensor
    reads: Sequence[IoFuture]

    def wait(self) -> None:
        """Return when all blocks are in memory and have their checksums, or raise DamageError."""
        for read in self.reads:
            read.wait()
        piece, blocks = self.piece, self.piece.blocks
        sums = slice(4 * piece.first_block, 4 * (piece.first_block + blocks.blocks))
        address = self.memory.data_ptr()
        weights = weight_checksums(blocks, address + blocks.weight_offset)
        is_intact = weights == piece.record.weight_checksums[sums]
        if not piece.record.blank:
            is_intact &= block_checksums(blocks, address) == piece.record.checksums[sums]
        if not is_intact:
            begin = piece.first_block * blocks.block
            message = (
                f"Chunk {piece.record.chunk} was read from {piece.file.path}, elements {begin} to"
                f" {begin + blocks.elements - 1} of the extent at {piece.record.extent.offset}:"
                " they are not those that were written, their checksum does not fit. `tensorstow"
                " run scrub` says what else is damaged; go on from a snapshot, or from a checkpoint"
                " elsewhere."
            )
            raise DamageError(message)

    def copy_to(self, shape: ChunkShape, memory: torch.Tensor, position: int) -> None:
        """Copy all streams of the piece to ``position`` of a chunk of ``shape`` in ``memory``."""
        piece, blocks = self.piece, self.piece.blocks
        # The first block may begin with elements of other pieces.
        first = piece.position - piece.first_block * blocks.block
        for (stream, source), (_, target) in zip(_streams(blocks), _streams(shape), strict=True):
            begin, at = source + stream.span(first), target + stream.span(position)
            nbytes = stream.span(piece.count)
            memory[at : at + nbytes] = self.memory[begin : begin + nbytes]


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

    def end(self) -> int:
        """Return the element after its last."""
        return self.start + self.count


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
                place = _Run(run.start, run.count, number, run.position)
                self._runs.setdefault(run.parameter, []).append(place)
        for runs in self._runs.values():
            # `find` looks for the first run that ends after an element.
            runs.sort(key=_Run.end)

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

    def find(self, number: int, start: int, stop: int) -> Iterator[tuple[int, StoredPiece]]:
        """Yield the pieces that have elements [start, stop) of this rank's part of a parameter.

        With each comes its first element.
        """
        runs = self._runs.get(number, [])
        for run in runs[bisect(runs, start, key=_Run.end) :]:
            first, end = max(start, run.start), min(stop, run.end())
            if first >= end:
                return
            record = self._records[run.chunk]
            yield (
                first,
                StoredPiece(
                    self._files[record.extent.file],
                    record,
                    self._shapes[run.chunk],
                    run.position + first - run.start,
                    end - first,
                ),
            )

    def read_tensor(self, kind: str, name: str) -> torch.Tensor:
        """Return a tensor that the generation has beside its chunks."""
        record = self._tensors[kind, name]
        return read_tensor(self._files[record.extent.file], record)


def _whole(parameter: StoredParameter) -> StoredParameter:
    if not parameter.is_sharded:
        return parameter
    if parameter.rows is None or parameter.order is not None:
        refuse_cut(parameter.name)
    shape = (parameter.rows[1], *parameter.shape[1:])
    return replace(parameter, shape=shape, rows=None, is_sharded=False)
