"""Checksums per block: the same as one made by hand, and every bit counts."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstow import _native
from tensorstow.store.checksums import block_checksums, differing_runs, weight_checksums
from tensorstow.store.records import ChunkShape, StreamShape, padded

STREAMS = st.sampled_from(
    [
        StreamShape(4, 1),
        StreamShape(2, 1),
        StreamShape(1, 1),
        StreamShape(4, 32),
        StreamShape(2, 32),
    ]
)
SHAPES = st.builds(
    ChunkShape,
    elements=st.integers(0, 700),
    block=st.sampled_from([32, 64, 256, 1024]),
    streams=st.lists(STREAMS, max_size=4).map(tuple),
    weight=STREAMS,
)


def by_hand(shape: ChunkShape, data: bytes) -> bytes:
    """Cut the streams out of the extent first, then the blocks out of the streams."""
    streams, at = [], 0
    for stream in shape.streams:
        nbytes = -(-shape.elements // stream.per) * stream.bytes
        streams.append((stream, data[at : at + nbytes]))
        at += padded(nbytes)
    sums = []
    for first in range(0, shape.elements, shape.block):
        seed = 0
        for stream, run in streams:
            width = shape.block // stream.per * stream.bytes
            start = first // stream.per * stream.bytes
            piece = bytearray(run[start : start + width])
            kept = torch.frombuffer(piece, dtype=torch.uint8) if piece else torch.empty(0)
            seed = _native.checksum(kept.data_ptr(), len(piece), seed)
        sums.append(seed)
    return struct.pack(f"<{len(sums)}I", *sums)


@given(shape=SHAPES, seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_blocks_are_summed_up_stream_after_stream(shape: ChunkShape, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (max(1, shape.nbytes),), dtype=torch.uint8, generator=generator)
    found = block_checksums(shape, data.data_ptr())
    assert len(found) == 4 * shape.blocks
    assert found == by_hand(shape, bytes(data.numpy()))


def test_every_bit_of_a_block_counts_and_of_no_other() -> None:
    shape = ChunkShape(96, 32, (StreamShape(4, 32), StreamShape(2, 1)), StreamShape(2, 1))
    data = torch.zeros(shape.nbytes, dtype=torch.uint8)
    states, weights = (
        block_checksums(shape, data.data_ptr()),
        weight_checksums(shape, data.data_ptr() + shape.weight_offset),
    )
    for at, blocks in ((4, [1]), (padded(12) + 2 * 64, [2]), (13, []), (shape.weight_offset, [])):
        data[at] ^= 1
        bad = list(differing_runs(block_checksums(shape, data.data_ptr()), states))
        assert bad == [(k, k + 1) for k in blocks], at
        data[at] ^= 1
    data[shape.weight_offset + 2 * 32] ^= 1
    found = weight_checksums(shape, data.data_ptr() + shape.weight_offset)
    assert list(differing_runs(found, weights)) == [(1, 2)]


@pytest.mark.parametrize(
    ("found", "kept", "runs"),
    [
        ("aabb", "aabb", []),
        ("abbba", "aaaaa", [(1, 4)]),
        ("bab", "aaa", [(0, 1), (2, 3)]),
        ("aaa", "a", [(1, 3)]),
        ("", "aa", [(0, 2)]),
        ("", "", []),
    ],
)
def test_runs_of_blocks_that_differ(found: str, kept: str, runs: list[tuple[int, int]]) -> None:
    wide = (bytes(b for letter in text.encode() for b in [letter] * 4) for text in (found, kept))
    assert list(differing_runs(*wide)) == runs
