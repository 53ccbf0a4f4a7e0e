"""Reads back everything that is stored, and reports what is damaged."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tensorstow.base.errors import TransferError
from tensorstow.io.arena import Arena
from tensorstow.io.files import IoFuture
from tensorstow.store.pieces import Flaw, ScrubPiece, chunk_pieces, tensor_pieces
from tensorstow.store.records import ChunkRecord, ChunkShape, TensorRecord, chunk_shapes
from tensorstow.store.store import Store


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not those that were written, or cannot be read."""

    path: Path
    offset: int
    nbytes: int
    what: str
    """Which chunk and elements, or which tensor; and what was found."""
    generations: tuple[int, ...]

    def __str__(self) -> str:
        """Return one line for people."""
        numbers = ", ".join(map(str, self.generations))
        where = f"{self.path}, {self.nbytes} bytes at offset {self.offset}"
        return f"{where}: {self.what} (generation {numbers})"


@dataclass(frozen=True, slots=True)
class ScrubProgress:
    """How far a scrub is."""

    done_bytes: int
    total_bytes: int
    found: tuple[Damage, ...]
    """Since the one before."""


def scrub(store: Store, numbers: Sequence[int] | None = None) -> Iterator[ScrubProgress]:
    """Read back the bytes of the generations ``numbers`` (default: all), each once.

    Memory: two extents of the largest chunk. Nothing is written.
    """
    pieces = _list_pieces(store, numbers)
    total = sum(piece.nbytes for piece, _ in pieces)
    largest = max((piece.nbytes for piece, _ in pieces), default=0)
    arena = Arena(2 * largest, in_children=False)
    futures: deque[IoFuture] = deque()
    done = 0
    for index, (piece, generations) in enumerate(pieces):
        # The next one is read while this one is summed up.
        for ahead in range(index + len(futures), min(index + 2, len(pieces))):
            upcoming, _ = pieces[ahead]
            slot = arena.tensor(ahead % 2 * largest, upcoming.nbytes, torch.uint8)
            futures.append(store.files[upcoming.file].read(slot, upcoming.offset))
        flaws = _judge(piece, futures.popleft(), arena.address + index % 2 * largest)
        done += piece.nbytes
        path = store.files[piece.file].path
        found = tuple(Damage(path, f.offset, f.nbytes, f.what, generations) for f in flaws)
        yield ScrubProgress(done, total, found)


def _judge(piece: ScrubPiece, future: IoFuture, address: int) -> list[Flaw]:
    try:
        future.wait()
    except TransferError as error:
        return [Flaw(piece.offset, piece.nbytes, f"{piece.whose} cannot be read: {error}")]
    return piece.check(address)


def _list_pieces(
    store: Store, numbers: Sequence[int] | None
) -> list[tuple[ScrubPiece, tuple[int, ...]]]:
    """List the bytes to read, in the order on disk; shared bytes are listed once."""
    owners: dict[tuple[ChunkRecord | TensorRecord, ChunkShape | None], list[int]] = {}
    for summary in store.generations():
        if numbers is not None and summary.number not in numbers:
            continue
        generation = store.load(summary)
        shapes = dict(enumerate(chunk_shapes(generation.layout)))
        for chunk in generation.chunks:
            owners.setdefault((chunk, shapes.get(chunk.chunk)), []).append(summary.number)
        for tensor in generation.tensors:
            owners.setdefault((tensor, None), []).append(summary.number)
    pieces = (
        (piece, tuple(generations))
        for (record, shape), generations in owners.items()
        for piece in (
            tensor_pieces(record)
            if isinstance(record, TensorRecord)
            else chunk_pieces(record, shape)
        )
    )
    return sorted(pieces, key=lambda pair: (pair[0].file, pair[0].offset))
