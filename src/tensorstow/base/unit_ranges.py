"""Short names of many units: "model.layers.0-33" for thirty-four of them."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def unit_ranges(units: Mapping[str, T]) -> dict[str, T]:
    """Return units with runs of numbered names as one entry each.

    A run has names that differ in their last part alone, whose numbers follow each other, and equal
    values. A unit alone keeps its name.

    Args:
        units: Values by the names of units, in any order.

    Returns:
        The values by name or range, each where its first unit was. A range includes its last
        number.
    """
    ranges: dict[str, T] = {}
    done: set[str] = set()
    for name, value in units.items():
        if name in done:
            continue
        prefix, last = _numbered(name)
        first = last
        if last is not None and first is not None:
            while units.get(f"{prefix}{first - 1}") == value and first > 0:
                first -= 1
            while units.get(f"{prefix}{last + 1}") == value:
                last += 1
            done |= {f"{prefix}{number}" for number in range(first, last + 1)}
        ranges[name if first == last else f"{prefix}{first}-{last}"] = value
    return ranges


def _numbered(name: str) -> tuple[str, int | None]:
    """Return what precedes the number that a name ends with, and the number; None: it has none."""
    prefix, dot, last = name.rpartition(".")
    if not (last.isascii() and last.isdecimal()) or str(int(last)) != last:
        return name, None
    return prefix + dot, int(last)
