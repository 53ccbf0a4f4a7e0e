"""Values of other types and sizes than are expected, and structures with one of them inside."""

import random
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

PLAIN = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**70, 10**400, -(10**400)),
    *(0.5, 1.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", " ", "x", "none", "auto", "disk", "9" * 5000, "1e9", "NaN", "\ud800", "../x", "/"),
    *([], [[]], [1, None], {}, {"": 0}, {"a": []}, {"a": {"b": "c"}}),
)
"""What JSON and its readers can make."""
ODD = (
    *PLAIN,
    *(10**5000, b"disk", (), set(), {"a"}, {1: "disk"}, range(3), 1j, object(), object, len),
    *(Path("x"), Decimal(1), Decimal("NaN"), Fraction(1, 2), np.int64(1), np.float32(0.5)),
    *(np.bool_(True), np.array([1, 2]), np.array(["disk"]), np.float64("nan")),  # noqa: FBT003
    *(torch.ones(2), torch.tensor(1), torch.tensor(float("nan")), torch.float32),
)
"""What a program can pass."""


def altered(value: Any, dice: random.Random) -> Any:  # noqa: ANN401  # of JSON
    """Return a copy of a structure with an odd value in a random place, or a name less or more."""
    if isinstance(value, Mapping) and value and dice.random() < 0.9:
        name = dice.choice(list(value))
        rest = {each: inner for each, inner in value.items() if each != name}
        kind = dice.random()
        if kind < 0.05:
            return rest
        if kind < 0.1:
            return {**rest, f"{name}s": value[name]}
        return {**rest, name: altered(value[name], dice)}
    if isinstance(value, Sequence) and not isinstance(value, str) and value and dice.random() < 0.5:
        index = dice.randrange(len(value))
        return [*value[:index], altered(value[index], dice), *value[index + 1 :]]
    return dice.choice(PLAIN)
