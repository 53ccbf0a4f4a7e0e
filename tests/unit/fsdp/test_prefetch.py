"""One shelf is open, and what followed the last two is fetched ahead."""

from pathlib import Path

from tensorstow.fsdp.prefetch import Prefetcher
from tensorstow.io.buffer_pool import Shelf, Shelves

SIZE = 1 << 16


def _use(shelf: Shelf, prefetcher: Prefetcher) -> bool:
    """Return whether it was in memory before it was asked for."""
    there = shelf.present
    prefetcher.open(shelf)
    assert shelf.present
    prefetcher.close(shelf)
    return there


def test_units_are_fetched_in_the_order_of_forward_and_of_backward(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 5 * SIZE, 3 * SIZE)
    made = [shelves.add(SIZE) for _ in range(5)]
    for shelf in made:
        shelf.lease(to_change=True)
        shelf.release(changed=True)
        shelves.settle()
    prefetcher = Prefetcher(1)
    course = [0, 1, 2, 3, 4, 3, 2, 1, 0]
    first = [_use(made[i], prefetcher) for i in course]
    again = [_use(made[i], prefetcher) for i in course]
    assert not all(first)
    assert all(again[2:])


def test_one_shelf_is_open_at_a_time(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 2 * SIZE, 2 * SIZE)
    first, second = shelves.add(SIZE), shelves.add(SIZE)
    prefetcher = Prefetcher(0)
    prefetcher.open(first)
    prefetcher.open(first)  # another parameter of the unit
    assert (first.leases, second.leases) == (1, 0)
    prefetcher.open(second)  # and nobody has closed the first
    assert (first.leases, second.leases) == (0, 1)
    prefetcher.close(first)
    assert (first.leases, second.leases) == (0, 1)
    prefetcher.close(second)
    prefetcher.close(second)
    assert (first.leases, second.leases) == (0, 0)


def test_nothing_is_fetched_ahead_where_that_was_not_asked(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 3 * SIZE, SIZE)
    made = [shelves.add(SIZE) for _ in range(3)]
    for shelf in made:
        shelf.lease(to_change=True)
        shelf.release(changed=True)
    prefetcher = Prefetcher(0)
    for _ in range(2):
        assert not any(_use(made[i], prefetcher) for i in (0, 1, 2))
