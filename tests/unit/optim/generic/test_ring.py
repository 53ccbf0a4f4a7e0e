"""Leases never overlap, come free in order, and what fits when idle always fits at last."""

from hypothesis import given
from hypothesis import strategies as st

from tensorstow.optim.generic.ring import Lease, Ring

CAPACITY = 1 << 16


@given(st.lists(st.tuples(st.booleans(), st.integers(1, CAPACITY), st.integers(0, 9)), max_size=60))
def test_leases_do_not_overlap(program: list[tuple[bool, int, int]]) -> None:
    ring, held = Ring(CAPACITY), list[Lease]()
    for takes, nbytes, pick in program:
        if takes:
            lease = ring.lend(nbytes)
            if lease is None:
                assert ring
                continue
            assert lease.region.numel() == nbytes
            assert lease.offset >= 0
            assert lease.end <= CAPACITY
            assert all(lease.end <= x.offset or x.end <= lease.offset for x in held)
            held.append(lease)
        elif held:
            ring.give_back(held.pop(pick % len(held)))
    for lease in held:
        ring.give_back(lease)
    assert not ring
    assert ring.lend(CAPACITY) is not None


def test_it_goes_round() -> None:
    ring = Ring(10 * 4096)
    leases = [ring.lend(4 * 4096), ring.lend(4 * 4096)]
    assert [x.offset for x in leases if x] == [0, 4 * 4096]
    assert ring.lend(4 * 4096) is None
    ring.give_back(leases[0])  # type: ignore[arg-type]
    third = ring.lend(4 * 4096)
    assert third is not None
    assert third.offset == 0
    assert ring.high_water == 8 * 4096


def test_no_capacity_lends_nothing() -> None:
    assert Ring(0).lend(1) is None
