"""Ranges of units in a plan: read as their units, and printed as ranges."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstow import Plan, Tier
from tensorstow.base.errors import OptionError
from tensorstow.base.plan import by_unit, with_ranges


def test_a_range_names_both_ends() -> None:
    plan = Plan(parameters="disk", parameter_units={"model.layers.0-2": "cuda", "": "cpu"})  # type: ignore[arg-type, dict-item]
    names = ("model.layers.0", "model.layers.1", "model.layers.2")
    assert plan.parameter_units == {**dict.fromkeys(names, Tier.DEVICE), "": Tier.HOST}
    assert plan.tier_of("model.layers.3") == Tier.DISK
    activations = Plan(activation_units={"9-11": "recompute"})  # type: ignore[dict-item]
    assert list(activations.activation_units) == ["9", "10", "11"]


def test_a_plan_is_printed_with_ranges() -> None:
    units = {f"h.{n}": "device" for n in range(12)} | {"h.4": "disk", "": "disk", "x.1": "device"}
    plan = Plan(parameter_units=units)  # type: ignore[arg-type]
    compact = {"": "disk", "h.0-3": "device", "h.4": "disk", "h.5-11": "device", "x.1": "device"}
    assert f"parameter_units={compact!r}, stage=" in repr(plan)
    assert json.loads(plan.to_json())["parameter_units"] == compact
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan(parameter_units=compact) == plan  # type: ignore[arg-type]
    assert copy.deepcopy(plan) == plan.but() == plan


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ({"h.3-1": "device"}, r"range 'h\.3-1'"),
        ({"h.0-100000": "device"}, "at most 100,000 units"),
        ({"h.0-3": "device", "h.2": "disk"}, r"unit 'h\.2' twice"),
        ({"h.0-3": "tape"}, r"parameter_units\['h.0-3'\]"),
    ],
)
def test_a_range_that_cannot_be_meant_is_refused(units: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(OptionError, match=message):
        Plan(parameter_units=units)


@pytest.mark.parametrize("name", ["a-b", "h.0-3.up", "h.00-3", "h.0-", "-3", "1-2-3", "h.-1-2"])
def test_other_names_are_names(name: str) -> None:
    assert list(Plan(parameter_units={name: Tier.DISK}).parameter_units) == [name]


NAMES = st.sampled_from(["", "a", "h.", "h", "0-1", "01"]).flatmap(
    lambda start: st.integers(0, 12).map(lambda n: f"{start}{n}")
)


@given(st.dictionaries(st.one_of(NAMES, st.text(max_size=3)), st.sampled_from("xyz")))
def test_ranges_lose_nothing(values: dict[str, str]) -> None:
    read = by_unit(str)
    try:
        expanded = read(values, "units")
    except OptionError:
        return  # a range among the names
    assert read(with_ranges(expanded), "units") == expanded
    assert len(with_ranges(expanded)) <= len(expanded)
