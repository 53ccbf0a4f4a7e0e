"""Ranges of units: what they stand for is what was given."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstow.base.unit_ranges import unit_ranges


@pytest.mark.parametrize(
    ("units", "ranges"),
    [
        ({}, {}),
        ({"": "device"}, {"": "device"}),
        ({"h.3": "disk"}, {"h.3": "disk"}),
        ({f"h.{n}": "disk" for n in range(34)}, {"h.0-33": "disk"}),
        ({"0": "disk", "1": "disk"}, {"0-1": "disk"}),
        (
            {"": "device", "h.0": "device", "h.1": "device", "h.2": "disk", "g.3": "device"},
            {"": "device", "h.0-1": "device", "h.2": "disk", "g.3": "device"},
        ),
        (
            {"h.2": "disk", "h.0": "disk", "h.1": "disk", "h.4": "disk"},
            {"h.0-2": "disk", "h.4": "disk"},
        ),
        ({"h.01": "disk", "h.2": "disk"}, {"h.01": "disk", "h.2": "disk"}),
        ({"h.0.tiles.1": "disk", "h.0.tiles.2": "disk"}, {"h.0.tiles.1-2": "disk"}),
    ],
)
def test_runs_are_one_entry(units: dict[str, str], ranges: dict[str, str]) -> None:
    assert unit_ranges(units) == ranges


def expanded(ranges: dict[str, str]) -> dict[str, str]:
    units = {}
    for name, tier in ranges.items():
        if found := re.fullmatch(r"(.*?)(\d+)-(\d+)", name):
            for number in range(int(found[2]), int(found[3]) + 1):
                units[f"{found[1]}{number}"] = tier
        else:
            units[name] = tier
    return units


NAMES = st.sampled_from(
    ["", "embed", *(f"h.{n}" for n in range(12)), *(f"h.3.t.{n}" for n in range(4))]
)


@given(units=st.dictionaries(NAMES, st.sampled_from(["device", "host", "disk"])))
def test_nothing_is_lost_or_added(units: dict[str, str]) -> None:
    assert expanded(unit_ranges(units)) == units
