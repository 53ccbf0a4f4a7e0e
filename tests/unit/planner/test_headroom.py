"""Headroom: what stays free of a tier, and that plans leave it free to the byte."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import AWAY, HERE, SIZES, G
from tensorstow import Budget, Plan, Tier
from tensorstow.base.errors import BudgetError
from tensorstow.planner.headroom import Headroom, usual_headroom
from tensorstow.planner.placement import HEADROOM, Conditions, bytes_of, fit, items_of
from tensorstow.planner.search import PlanRequest, search

EIGHTH = Headroom(fixed=100, share=0.125)


def test_it_is_fixed_bytes_and_a_share() -> None:
    assert EIGHTH.beside(800) == 200
    assert Headroom().beside(800) == 0
    assert Headroom().within(800) == 800
    assert EIGHTH.within(50) == 0


@given(limit=st.integers(0, 1 << 50), share=st.sampled_from([0.0, 0.05, 0.08, 0.3]))
def test_what_is_within_a_limit_fits_it_with_its_headroom(limit: int, share: float) -> None:
    room = Headroom(1 << 20, share)
    held = room.within(limit)
    assert held == 0 or held + room.beside(held) <= limit
    more = held + 3
    assert more + room.beside(more) > limit - (1 << 20)


def test_a_24_gib_card_keeps_a_tenth_free() -> None:
    on_device = usual_headroom(device_is_host=False)[Tier.DEVICE]
    assert 0.08 < 1 - on_device.within(24 * G) / (24 * G) < 0.12
    assert Tier.DEVICE not in usual_headroom(device_is_host=True)


def with_headroom(conditions: Conditions) -> Conditions:
    headroom = usual_headroom(device_is_host=conditions.device_is_host)
    return replace(conditions, headroom=headroom)


@pytest.mark.parametrize("conditions", [HERE, AWAY], ids=["here", "away"])
def test_it_is_an_item_of_its_tier(conditions: Conditions) -> None:
    without = bytes_of(Plan(), SIZES, conditions)
    items = items_of(Plan(), SIZES, with_headroom(conditions))
    left_free = {item.tier: item.nbytes for item in items if item.purpose == HEADROOM}
    headroom = usual_headroom(device_is_host=conditions.device_is_host)
    assert left_free == {tier: room.beside(without[tier]) for tier, room in headroom.items()}


def test_a_plan_and_its_headroom_are_within_the_budget() -> None:
    """Also where buffers and states take what is left over."""
    on_disk = Plan(parameters="disk", states="disk")
    conditions = with_headroom(HERE)
    least = bytes_of(on_disk.but(weight_ram_budget=3 * G + (3 << 12)), SIZES, conditions)
    for more in (0, 1, G, 2 * G, 20 * G):
        budget = Budget(host=least[Tier.HOST] + more)
        fitted = fit(on_disk, SIZES, budget, conditions)
        assert isinstance(fitted, Plan)
        assert bytes_of(fitted, SIZES, conditions)[Tier.HOST] <= int(budget.host or 0)
        for spend in (False, True):
            request = PlanRequest(SIZES, budget, conditions, spend=spend)
            chosen = search(request).chosen
            assert bytes_of(chosen.plan, SIZES, conditions)[Tier.HOST] <= int(budget.host or 0)


def test_the_smallest_change_that_an_error_names_has_room_for_it() -> None:
    conditions = with_headroom(HERE)
    with pytest.raises(BudgetError, match=r"of HOST, headroom included\.") as caught:
        search(PlanRequest(SIZES, Budget(host=1 << 20), conditions))
    least = int(str(caught.value).split("host=")[1].split()[0])
    assert search(PlanRequest(SIZES, Budget(host=least), conditions)).chosen.plan
    with pytest.raises(BudgetError):
        search(PlanRequest(SIZES, Budget(host=least - 1), conditions))
