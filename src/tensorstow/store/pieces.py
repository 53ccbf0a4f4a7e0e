"""The pieces that a scrub reads, and how each is checked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tensorstow._native as _native
from tensorstow.store.checksums import (
    PIECE_BYTES,
    block_checksums,
    differing_runs,
    weight_checksums,
)
from tensorstow.store.records import ChunkRecord, ChunkShape, TensorRecord
from tensorstow.store.tensors import plain_bytes


@dataclass(frozen=True, slots=True)
class Flaw:
    """Bytes of an extent that are not those that were written."""

    offset: int
    """The offset in the file."""
    nbytes: int
    description: str


@dataclass(frozen=True, slots=True)
class ScrubPiece:
    """Some bytes of a data file to read at once."""

    file: int
    offset: int
    nbytes: int
    whose: str
    check: Callable[[int], list[Flaw]]
    """Judges the bytes, which are at an address."""


def chunk_pieces(record: ChunkRecord, shape: ChunkShape) -> list[ScrubPiece]:
    """Return one piece: all of the chunk, or its weights where its states are blank."""
    if record.blank and not shape.weight.bytes:
        return []
    skipped = shape.weight_offset if record.blank else 0
    start = record.extent.offset + skipped

    def check(address: int) -> list[Flaw]:
        flaws = [] if record.blank else list(_state_flaws(record, shape, address))
        return [*flaws, *_weight_flaws(record, shape, address + shape.weight_offset - skipped)]

    whose = f"chunk {record.chunk}"
    nbytes = shape.nbytes - skipped
    return [ScrubPiece(record.extent.file, start, nbytes, whose, check)]


def tensor_pieces(record: TensorRecord) -> Iterator[ScrubPiece]:
    """Return the pieces of a tensor; they must be checked in order."""
    nbytes = plain_bytes(record)
    whose = f"{record.kind} tensor {record.name!r}"
    seed = 0
    for start in range(0, nbytes, PIECE_BYTES):
        length = min(PIECE_BYTES, nbytes - start)
        is_last = start + length == nbytes

        def check(address: int, length: int = length, *, is_last: bool = is_last) -> list[Flaw]:
            nonlocal seed
            seed = _native.checksum(address, length, seed)
            if not is_last or seed == record.checksum:
                return []
            description = f"{whose} has checksum {seed:08x} instead of {record.checksum:08x}"
            return [Flaw(record.extent.offset, nbytes, description)]

        yield ScrubPiece(record.extent.file, record.extent.offset + start, length, whose, check)


def _state_flaws(record: ChunkRecord, shape: ChunkShape, address: int) -> Iterator[Flaw]:
    # A block's checksum is over all streams: the flaw is in one of them, and the first is named.
    first = shape.streams[0] if shape.streams else shape.weight
    for start, stop in _bad(shape, block_checksums(shape, address), record.checksums):
        offset, end = (record.extent.offset + first.span(n) for n in (start, stop))
        description = f"chunk {record.chunk}, states of elements {start} to {stop - 1} differ"
        yield Flaw(offset, end - offset, description)


def _weight_flaws(record: ChunkRecord, shape: ChunkShape, address: int) -> Iterator[Flaw]:
    if not shape.weight.bytes:
        return
    begin = record.extent.offset + shape.weight_offset
    for start, stop in _bad(shape, weight_checksums(shape, address), record.weight_checksums):
        offset, end = (begin + shape.weight.span(n) for n in (start, stop))
        description = f"chunk {record.chunk}, weights of elements {start} to {stop - 1} differ"
        yield Flaw(offset, end - offset, description)


def _bad(shape: ChunkShape, actual: bytes, expected: bytes) -> Iterator[tuple[int, int]]:
    """Return the ranges of elements whose checksums differ."""
    for first, last in differing_runs(actual, expected):
        yield first * shape.block, min(last * shape.block, shape.elements)
