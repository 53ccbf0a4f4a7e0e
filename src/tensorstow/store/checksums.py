"""Checksums of stored bytes: one per block of a chunk, and one per tensor."""

import struct
from collections.abc import Iterator
from itertools import groupby

import tensorstow._native as _native
from tensorstow.store.records import ChunkShape, StreamShape, padded

PIECE_BYTES = 4 << 20
"""A tensor's checksum is chained over pieces of this many bytes; part of the format."""


def block_checksums(shape: ChunkShape, address: int) -> bytes:
    """Return the checksums of a chunk's states, which lie at ``address`` as in an extent.

    Those of the streams of one block are chained, the first stream with seed 0.
    """
    starts, at = [], address
    for stream in shape.streams:
        starts.append((stream, at))
        at += padded(stream.span(shape.elements))
    return _pack(shape, starts)


def weight_checksums(shape: ChunkShape, address: int) -> bytes:
    """Return the checksums of a chunk's weights, which lie at ``address``."""
    return _pack(shape, [(shape.weight, address)])


def differing_runs(actual: bytes, expected: bytes) -> Iterator[tuple[int, int]]:
    """Return the runs (first, last + 1) of blocks whose checksums differ or are missing."""
    blocks = max(len(actual), len(expected)) // 4
    differs = [actual[4 * k : 4 * k + 4] != expected[4 * k : 4 * k + 4] for k in range(blocks)]
    for differ, run in groupby(range(blocks), key=differs.__getitem__):
        if differ:
            first, *rest = run
            yield first, first + len(rest) + 1


def _pack(shape: ChunkShape, streams: list[tuple[StreamShape, int]]) -> bytes:
    sums = list(_chained(shape, streams))
    return struct.pack(f"<{len(sums)}I", *sums)


def _chained(shape: ChunkShape, streams: list[tuple[StreamShape, int]]) -> Iterator[int]:
    for first in range(0, shape.elements, shape.block):
        count = min(shape.block, shape.elements - first)
        seed = 0
        for stream, address in streams:
            # No group is cut by a block, so what lies before it is a whole number of groups.
            start = address + stream.span(first)
            seed = _native.checksum(start, stream.span(count), seed)
        yield seed
