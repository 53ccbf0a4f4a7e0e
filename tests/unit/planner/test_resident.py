"""Which units stay in memory: bytes within the limit, largest first, the rest spread."""

import pytest

from tensorstow.base.errors import BudgetError
from tensorstow.planner.resident import UnitBytes, choose_resident, passing_bytes

BLOCKS = {f"h.{i}": UnitBytes(10, 10) for i in range(10)}


def test_buffers_hold_the_largest_run_of_units_and_what_is_around() -> None:
    sizes = [UnitBytes(n, n, around) for n, around in ((5, 0), (1, 2), (2, 0), (4, 0))]
    assert passing_bytes(sizes, 0) == 5 + 2
    assert passing_bytes(sizes, 1) == 4 + 5 + 2  # the first one follows the last
    assert passing_bytes(sizes, 9) == 12 + 2
    assert passing_bytes([], 2) == 0


def test_all_stay_where_there_is_room() -> None:
    assert choose_resident(BLOCKS, 100, 2) == (set(BLOCKS), 2)


def test_units_of_one_size_that_stay_are_spread_over_the_pass() -> None:
    stay, ahead = choose_resident(BLOCKS, 99, 2)
    assert ahead == 2
    assert len(stay) == 6  # beside three buffers
    assert choose_resident(BLOCKS, 50, 2)[0] == {"h.2", "h.7"}


def test_less_is_read_ahead_where_there_is_no_room() -> None:
    assert choose_resident(BLOCKS, 20, 2) == (set(), 1)
    assert choose_resident(BLOCKS, 19, 2) == (set(), 0)
    with pytest.raises(BudgetError, match=r"is 9 B, .* has 10 B: allow at least that"):
        choose_resident(BLOCKS, 9, 2)


def test_the_largest_units_stay_first() -> None:
    units = {"embed": UnitBytes(40, 40), **BLOCKS, "head": UnitBytes(40, 40)}
    stay, _ = choose_resident(units, 2 * 40 + 3 * 10 + 20, 2)
    assert {"embed", "head"} < stay
    assert len(stay) == 4
