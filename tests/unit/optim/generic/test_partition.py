"""Cuts cover a parameter once, and no slice's inner share ends within a vector."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstow.optim.generic.partition import GRAINS, VECTOR, Partition, can_partition, partition


def shares(numel: int, grain: int, threads: int) -> list[tuple[int, int]]:
    """Return what at::parallel_for hands to each thread."""
    sharers = max(1, min(threads, -(-numel // grain)))
    width = -(-numel // sharers)
    return [(i, min(i + width, numel)) for i in range(0, numel, width)]


def scalar_ends(begin: int, end: int, vector: int) -> range:
    """Return the elements of one thread's range that go through scalar code."""
    return range(end - (end - begin) % vector, end)


@settings(deadline=None)
@given(
    numel=st.integers(1, 600_000),
    elements=st.sampled_from([320, 1008, 4096, 16_384, 33_000, 100_001, 1 << 19]),
    threads=st.integers(1, 40),
    vector=st.sampled_from([8, 16, 32, 64]),
)
def test_the_same_elements_are_scalar_in_pieces_as_in_one(
    numel: int, elements: int, threads: int, vector: int
) -> None:
    if not can_partition(numel, threads):
        return
    pieces = partition(numel, elements, threads)
    assert [p.start for p in pieces] == [
        sum(p.numel for p in pieces[:i]) for i in range(len(pieces))
    ]
    assert sum(p.numel for p in pieces) == numel
    assert all(0 < p.numel <= max(elements, VECTOR) for p in pieces)
    for grain in GRAINS:
        whole = {i for a, b in shares(numel, grain, threads) for i in scalar_ends(a, b, vector)}
        ours = {
            p.start + begin + i
            for p in pieces
            for begin, end in p.bounds
            for a, b in shares(end - begin, grain, threads)
            for i in scalar_ends(a, b, vector)
        }
        assert ours == whole


def test_a_length_that_kernels_share_differently_is_not_cut() -> None:
    assert can_partition(5000, 1)
    assert not can_partition(5000, 2)
    assert can_partition(32_769, 2)
    assert not can_partition(40_000, 8)


def test_whole_vectors_per_thread_need_no_more_pieces_than_bytes() -> None:
    assert partition(1 << 20, 1 << 19, 2) == [
        Partition(0, (1 << 19,)),
        Partition(1 << 19, (1 << 19,)),
    ]


def test_a_thread_that_ends_within_a_vector_begins_a_piece() -> None:
    numel = 300_007
    starts = [p.start for p in partition(numel, 1 << 17, 2)]
    assert -(-numel // 2) in starts


@pytest.mark.parametrize("numel", [1, 63, 64, 65])
def test_what_is_small_is_one_piece(numel: int) -> None:
    assert [p.numel for p in partition(numel, 1 << 19, 1)] in ([numel], [64, numel - 64])
    assert sum(p.numel for p in partition(numel, 1 << 19, 1)) == numel
