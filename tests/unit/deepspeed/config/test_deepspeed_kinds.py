"""Values of keys: floats that are whole are counts, and nothing else is."""

import math
import sys

import pytest

from tensorstow.deepspeed.config.key import (
    BOOL,
    OBJECT,
    STEPS,
    TEXT,
    ValueType,
    is_off,
    number,
    one_of,
    positive,
    whole,
)


@pytest.mark.parametrize(("given", "taken"), [(5e8, 500_000_000), (1e9, 10**9), (3, 3), (0.0, 0)])
def test_whole_floats_are_counts(given: float, taken: int) -> None:
    found = whole().take(given)
    assert found == taken
    assert isinstance(found, int)


def test_a_large_int_keeps_every_bit() -> None:
    assert whole().take(sys.maxsize) == sys.maxsize


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (whole(), 1.5),
        (whole(), True),
        (whole(), "1"),
        (whole(), math.inf),
        (whole(), -1),
        (whole(0, 3), 4),
        (number(), -0.1),
        (number(), math.nan),
        (number(0.0, 1.0), 1.1),
        (positive(), 0),
        (one_of("cpu"), "gpu"),
        (one_of("cpu"), 1),
        (number(), 10**400),
        (number(), 1e39),
        (whole(), 10**400),
        (whole(), 2**63),
        (whole(), math.nan),
        (STEPS, math.nan),
        (STEPS, 10**400),
        (BOOL, 2),
        (BOOL, "true"),
        (TEXT, ""),
        (OBJECT, []),
        (STEPS, 0),
        (STEPS, -math.inf),
    ],
)
def test_others_are_refused(kind: ValueType, bad: object) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        kind.take(bad)


def test_words_are_read_in_any_case() -> None:
    assert one_of("ignore", "warn").take("Warn") == "warn"


def test_kinds_say_what_they_take() -> None:
    assert whole(1).allowed == "a whole number, at least 1"
    assert number(0.0, 1.0).allowed == "a number, from 0.0 to 1.0"
    assert one_of("none", "cpu").allowed == 'one of "none", "cpu"'


@pytest.mark.parametrize(
    "off", [None, False, {}, {"enabled": False, "x": 1}, {"a": {"b": {"enabled": False}}}]
)
def test_a_section_is_off_without_a_switch_that_is_on(off: object) -> None:
    assert is_off(off)


@pytest.mark.parametrize(
    "on", [True, {"x": 1}, {"enabled": True}, {"enabled": False, "a": {"enabled": True}}]
)
def test_a_section_is_on_otherwise(on: object) -> None:
    assert not is_off(on)
