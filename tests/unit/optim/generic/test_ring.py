"""Leases never overlap, come free in order, and what fits when idle always fits at last."""

from hypothesis import given
from hypothesis import strategies as st

from tensorstow.optim.generic.ring import PieceRing, RingBlock

CAPACITY = 1 << 16


@given(st.lists(st.tuples(st.booleans(), st.integers(1, CAPACITY), st.integers(0, 9)), max_size=60))
def test_leases_do_not_overlap(program: list[tuple[bool, int, int]]) -> None:
    ring, held = PieceRing(CAPACITY), list[RingBlock]()
    for takes, nbytes, pick in program:
        if takes:
            block = ring.allocate(nbytes)
            if block is None:
                assert ring
                continue
            assert block.region.numel() == nbytes
            assert block.offset >= 0
            assert block.end <= CAPACITY
            assert all(block.end <= x.offset or x.end <= block.offset for x in held)
            held.append(block)
        elif held:
            ring.free(held.pop(pick % len(held)))
    for block in held:
        ring.free(block)
    assert not ring
    assert ring.allocate(CAPACITY) is not None


def test_it_goes_round() -> None:
    ring = PieceRing(10 * 4096)
    leases = [ring.allocate(4 * 4096), ring.allocate(4 * 4096)]
    assert [x.offset for x in leases if x] == [0, 4 * 4096]
    assert ring.allocate(4 * 4096) is None
    ring.free(leases[0])  # type: ignore[arg-type]
    third = ring.allocate(4 * 4096)
    assert third is not None
    assert third.offset == 0
    assert ring.high_water == 8 * 4096


def test_no_capacity_allocates_nothing() -> None:
    assert PieceRing(0).allocate(1) is None
