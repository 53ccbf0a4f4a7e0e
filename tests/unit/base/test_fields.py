"""Dataclasses whose fields are checked by their annotations, and read from JSON."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from attacks.values import ODD, altered
from tensorstow import Budget, PipelinePolicy, Plan
from tensorstow.base.errors import OptionError, StowError, abbreviated
from tensorstow.base.fields import (
    PositiveFloat,
    check_fields,
    from_fields,
    json_object,
    whole_number,
)
from tensorstow.base.profile import ComputeRates, DirectoryRates, LinkRates, Profile
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.state_store import Placement

MEANT = "A case is JSON"


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Inner:
    rate: PositiveFloat
    deep: "Inner | None" = None


@dataclass(frozen=True, slots=True)
class Case:
    count: int = 1
    share: float = 0.5
    is_on: bool = False
    word: Literal["a", "b"] | int = "a"
    colour: Colour = Colour.RED
    names: Sequence[str] = ()
    sizes: Mapping[str, float] = field(default_factory=dict)
    inner: Inner | None = None
    least: Annotated[int, whole_number(2)] = 2
    call: Callable[[], int] | None = None
    anything: Any = None

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"count": np.int64(3)}, 3),
        ({"share": 1}, 1.0),
        ({"share": np.float32(0.5)}, 0.5),
        ({"word": "b"}, "b"),
        ({"word": 7}, 7),
        ({"colour": "red"}, Colour.RED),
        ({"names": ["x", "y"]}, ("x", "y")),
        ({"sizes": {"x": 1}}, {"x": 1.0}),
        ({"inner": {"rate": 2, "deep": {"rate": 3}}}, Inner(2.0, Inner(3.0))),
        ({"inner": Inner(2.0)}, Inner(2.0)),
        ({"anything": [{}]}, [{}]),
    ],
)
def test_values_become_what_the_annotation_says(given: dict[str, Any], expected: object) -> None:
    (name,) = given
    found = getattr(Case(**given), name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"count": True}, "count=True was given: it is a whole number"),
        ({"count": 1.0}, "count=1.0 was given"),
        ({"count": 2**63}, "below 2\\*\\*63"),
        ({"count": 10**5000}, "count=int that is too long to print was given"),
        ({"share": float("nan")}, "share=nan was given: it is a number up to 3.4e"),
        ({"share": True}, "share=True"),
        ({"share": "0.5"}, "share='0.5'"),
        ({"share": 10**400}, r"share=1000*\.\.\. was given"),
        ({"is_on": 1}, "is_on=1 was given: it is True or False"),
        ({"word": "c"}, 'word=\'c\' was given: it is "a", "b" or a whole number'),
        ({"word": True}, "word=True"),
        ({"colour": "blue"}, 'it is "red"'),
        ({"colour": []}, 'it is "red"'),
        ({"names": "xy"}, "names='xy' was given: it is a list"),
        ({"names": ["x", 1]}, r"names\[1\]=1 was given: it is a text"),
        ({"sizes": {1: 1}}, "a key of sizes=1"),
        ({"sizes": {"x": None}}, r"sizes\['x'\]=None"),
        ({"sizes": torch.ones(2)}, "it is a mapping"),
        ({"inner": {"rat": 1}}, "it has no inner.rat: 'rate'?"),
        ({"inner": {}}, "lacks inner.rate"),
        ({"inner": {"rate": 1, "deep": {"rate": 0}}}, "inner.deep.rate=0 was given"),
        ({"inner": 3}, "an instance of Inner"),
        ({"least": 1}, "at least 2"),
        ({"least": None}, "at least 2"),
        ({"call": 3}, "call=3"),
    ],
)
def test_what_no_annotation_takes_is_an_error_that_names_it(
    given: dict[str, Any], reported: str
) -> None:
    with pytest.raises(OptionError, match=reported):
        Case(**given)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("{", "A case is JSON: Expecting"),
        ("[1]", r"A case is JSON: this is \[1\]"),
        ('{"count": 1, "count": 2}', "it has 'count' twice"),
        ('{"counts": 1}', "it has no counts: 'count'"),
        ('{"count": ' + "9" * 5000 + "}", "A case is JSON"),
        ("[" * 100_000, "A case is JSON"),
        ('{"share": NaN}', "share=nan"),
        ('{"share": 1e999}', "share=inf"),
        ('{"count": null}', "count=None"),
    ],
)
def test_json_that_is_none_of_it_is_an_error(text: str, reported: str) -> None:
    with pytest.raises(OptionError, match=reported):
        from_fields(Case, json_object(text, MEANT), MEANT)


def test_an_abbreviated_value_is_short() -> None:
    assert abbreviated("x") == "'x'"
    for value in ODD:
        assert len(abbreviated(value)) < 100


PLACE = Placement(0.0, (), None)
RATES = {"read": 1.0, "write": 1.0, "mixed": 1.0, "block_bytes": 1, "depth": 1}
PROFILE: dict[str, Any] = {
    "machine": {"cpu": "x"},
    **dict.fromkeys(("memory_read", "memory_write", "memory_copy"), 1e9),
    "checksums": 1e9,
    "update": {"float32/fp32": 1e9},
    "device_update": {},
    "compute": {
        "cpu": {
            "flops": {"float32": 1e9},
            **dict.fromkeys(("tensor_bytes", "call_seconds", "random_elements"), 1.0),
        }
    },
    "directories": {"/x": RATES},
    "link": {"up": 1.0, "down": 1.0, "both": 1.0},
}


@pytest.mark.parametrize(
    ("cls", "others"),
    [
        (Plan, {}),
        (Plan, {"parameters": "disk", "states": "disk", "activations": "disk"}),
        (Budget, {}),
        (PipelinePolicy, {}),
        (OffloadPolicy, {"placement": PLACE}),
        (Profile, PROFILE),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_class_takes_any_value_or_raises_an_error_of_ours(
    cls: type, others: dict[str, Any]
) -> None:
    taken = refused = 0
    for one in fields(cls):
        for value in ODD:
            try:
                cls(**{**others, one.name: value})
                taken += 1
            except StowError as error:
                refused += len(str(error)) < 1000
    assert taken + refused == len(ODD) * len(fields(cls))
    assert taken >= len(fields(cls))
    assert refused > 5 * taken


@pytest.mark.parametrize(
    ("read", "plain"),
    [
        (Plan.from_json, json.loads(Plan(parameters="disk", states="disk").to_json())),
        (Profile.from_json, PROFILE),
    ],
    ids=["Plan", "Profile"],
)
def test_json_of_any_values_is_read_or_an_error_of_ours(
    read: Callable[[str], Any], plain: dict[str, Any]
) -> None:
    assert read(json.dumps(plain)) is not None
    dice = random.Random(5)  # noqa: S311
    refused = 0
    for _ in range(1500):
        try:
            read(json.dumps(altered(plain, dice)))
        except StowError:
            refused += 1
    assert refused > 500


def test_rates_of_a_profile_are_positive() -> None:
    for value in (0, -1.0, True, "1", None):
        given = {**PROFILE, "directories": {"/x": {**RATES, "mixed": value, "verdict": "x"}}}
        with pytest.raises(OptionError, match=r"directories\['/x'\]\.mixed="):
            Profile.from_json(json.dumps(given))
    read = Profile.from_json(json.dumps(PROFILE))
    assert read.directories == {"/x": DirectoryRates(1.0, 1.0, 1.0, 1, 1)}
    assert read.link == LinkRates(1.0, 1.0, 1.0)
    assert read.compute == {"cpu": ComputeRates({"float32": 1e9}, 1.0, 1.0, 1.0)}
