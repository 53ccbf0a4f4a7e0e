"""Reads back everything that is stored, and reports what is damaged."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import tensorstow._native as _native
from tensorstow.base.errors import TransferError
from tensorstow.io.arena import read_ahead
from tensorstow.io.files import File, IoFuture
from tensorstow.store.bounds import outside
from tensorstow.store.checksums import (
    PIECE_BYTES,
    block_checksums,
    differing_runs,
    weight_checksums,
)
from tensorstow.store.records import (
    ChunkRecord,
    ChunkShape,
    Generation,
    StreamShape,
    TensorRecord,
    chunk_shapes,
)
from tensorstow.store.tensors import plain_bytes

Flaw = tuple[int, int, str]
"""Bytes that are not those that were written: their offset in the file, their count, and what."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not those that were written, or cannot be read."""

    path: Path
    offset: int
    nbytes: int
    description: str
    """The chunk and its elements, or the tensor; and the difference."""
    generations: tuple[int, ...]

    def __str__(self) -> str:
        """Return one line for people."""
        numbers = ", ".join(map(str, self.generations))
        location = f"{self.path}, {self.nbytes} bytes at offset {self.offset}"
        return f"{location}: {self.description} (generation {numbers})"


@dataclass(frozen=True, slots=True)
class ScrubProgress:
    """The progress of a scrub."""

    done_bytes: int
    total_bytes: int
    damages: tuple[Damage, ...]
    """The damages since the previous report."""


@dataclass(frozen=True, slots=True)
class ScrubPiece:
    """Some bytes of a data file to read at once."""

    file: int
    offset: int
    nbytes: int
    whose: str
    check: Callable[[int], list[Flaw]]
    """Judges the bytes, which are at an address."""


def scrub(files: Sequence[File], generations: Sequence[Generation]) -> Iterator[ScrubProgress]:
    """Read back the bytes of ``generations`` in ``files``, each once.

    Memory: two extents of the largest chunk. Nothing is written. Of a generation with bytes beyond
    the end of a file nothing is read: how much that would be is only what its rows say.
    """
    sizes = [os.fstat(file.fd).st_size for file in files]
    beyond = [
        Damage(
            files[extent.file].path,
            extent.offset,
            nbytes,
            "beyond the end of the file",
            (generation.number,),
        )
        for generation in generations
        for extent, nbytes in outside(generation, sizes)
    ]
    numbers = {number for damage in beyond for number in damage.generations}
    pieces = _list_pieces(
        generation for generation in generations if generation.number not in numbers
    )
    total = sum(piece.nbytes for piece, _ in pieces)
    if beyond:
        yield ScrubProgress(0, total, tuple(beyond))

    def start(number: int, memory: torch.Tensor) -> IoFuture:
        piece, _ = pieces[number]
        return files[piece.file].read(memory, piece.offset)

    reads = read_ahead([piece.nbytes for piece, _ in pieces], start, ahead=1)
    done = 0
    for (piece, owners), (read, memory) in zip(pieces, reads, strict=True):
        flaws = _judge(piece, read, memory.data_ptr())
        done += piece.nbytes
        path = files[piece.file].path
        damages = tuple(Damage(path, *flaw, owners) for flaw in flaws)
        yield ScrubProgress(done, total, damages)


def _judge(piece: ScrubPiece, future: IoFuture, address: int) -> list[Flaw]:
    try:
        future.wait()
    except TransferError as error:
        return [(piece.offset, piece.nbytes, f"{piece.whose} cannot be read: {error}")]
    return piece.check(address)


def _list_pieces(generations: Iterable[Generation]) -> list[tuple[ScrubPiece, tuple[int, ...]]]:
    """List the bytes to read, in the order on disk; shared bytes are listed once."""
    of_chunks: dict[tuple[ChunkRecord, ChunkShape], list[int]] = {}
    of_tensors: dict[TensorRecord, list[int]] = {}
    for generation in generations:
        shapes = chunk_shapes(generation.layout)
        for chunk in generation.chunks:
            of_chunks.setdefault((chunk, shapes[chunk.chunk]), []).append(generation.number)
        for tensor in generation.tensors:
            of_tensors.setdefault(tensor, []).append(generation.number)
    pieces = [(p, tuple(n)) for key, n in of_chunks.items() for p in chunk_pieces(*key)]
    pieces += [(p, tuple(n)) for tensor, n in of_tensors.items() for p in tensor_pieces(tensor)]
    # On disk a tensor's pieces are in their order, which its running checksum needs.
    return sorted(pieces, key=lambda pair: (pair[0].file, pair[0].offset))


def chunk_pieces(record: ChunkRecord, shape: ChunkShape) -> list[ScrubPiece]:
    """Return one piece: all of the chunk, or its weights where its states are blank."""
    if record.blank and not shape.weight.bytes:
        return []
    # Of a blank chunk only the weights were written.
    skipped = shape.weight_offset if record.blank else 0
    whose = f"chunk {record.chunk}"

    def flaws(
        kind: str, stream: StreamShape, begin: int, actual: bytes, expected: bytes
    ) -> Iterator[Flaw]:
        for first, last in differing_runs(actual, expected):
            start, stop = first * shape.block, min(last * shape.block, shape.elements)
            offset, end = (record.extent.offset + begin + stream.span(n) for n in (start, stop))
            yield offset, end - offset, f"{whose}, {kind} of elements {start} to {stop - 1} differ"

    def check(address: int) -> list[Flaw]:
        differing: list[Flaw] = []
        if not record.blank:
            # A block's checksum is over all streams: the flaw is in one, and the first is named.
            first = shape.streams[0] if shape.streams else shape.weight
            differing += flaws(
                "states", first, 0, block_checksums(shape, address), record.checksums
            )
        if shape.weight.bytes:
            actual = weight_checksums(shape, address + shape.weight_offset - skipped)
            begin, expected = shape.weight_offset, record.weight_checksums
            differing += flaws("weights", shape.weight, begin, actual, expected)
        return differing

    start, nbytes = record.extent.offset + skipped, shape.nbytes - skipped
    return [ScrubPiece(record.extent.file, start, nbytes, whose, check)]


def tensor_pieces(record: TensorRecord) -> Iterator[ScrubPiece]:
    """Return the pieces of a tensor; they must be checked in order."""
    nbytes = plain_bytes(record)
    whose = f"{record.kind} tensor {record.name!r}"
    seed = 0
    for start in range(0, nbytes, PIECE_BYTES):
        length = min(PIECE_BYTES, nbytes - start)
        is_last = start + length == nbytes

        # The defaults are those of this piece; all pieces go on with one sum.
        def check(address: int, length: int = length, *, is_last: bool = is_last) -> list[Flaw]:
            nonlocal seed
            seed = _native.checksum(address, length, seed)
            if not is_last or seed == record.checksum:
                return []
            difference = f"{whose} has checksum {seed:08x} instead of {record.checksum:08x}"
            return [(record.extent.offset, nbytes, difference)]

        yield ScrubPiece(record.extent.file, record.extent.offset + start, length, whose, check)
