"""Reads sizes such as "48GiB", formats bytes and counts, and divides files by size."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Annotated, TypeVar

from tensorstow.base.errors import OptionError, abbreviated

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("kB", "MB", "GB", "TB", "PB")
_FACTORS = (
    {"b": 1}
    | {unit.lower(): 1024**power for power, unit in enumerate(_BINARY, start=1)}
    | {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL, start=1)}
    # One letter is binary, as for docker, slurm and the JVM.
    | {unit[0].lower(): 1024**power for power, unit in enumerate(_BINARY, start=1)}
)
_SIZE = re.compile(
    r"\s*(?P<number>-?\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE | re.ASCII
)
_EXAMPLES = 'a number with a unit, such as "512MiB", "1.5 GiB", "64GB" or "24g" (GiB)'


_MOST = 2**63
"""Bytes that no machine has: counts of them have 64 bits."""
_LEAST_TEXT = 2**20
"""Texts without a unit below this, but for 0, are no bytes: "48" was meant as gibibytes."""
_LEAST_NUMBER = 4096
"""So are numbers below this: nothing is kept in less than a page."""
_Item = TypeVar("_Item")


def parts_within(
    items: Iterable[_Item], most: float | None, nbytes: Callable[[_Item], float]
) -> Iterator[list[_Item]]:
    """Yield items in lists of at most ``most`` bytes each, in their order; None: in one list.

    A larger item has a list of its own. No items are one empty list.
    """
    part: list[_Item] = []
    total = 0.0
    for item in items:
        size = nbytes(item)
        if part and most is not None and total + size > most:
            yield part
            part, total = [], 0.0
        part.append(item)
        total += size
    yield part


class Bytes(int):
    """A number that counts bytes, however few: it was computed, or written with a unit."""


def parse_size(value: object, name: str = "size") -> Bytes:
    """Return ``value`` in bytes, rounded down.

    Units may be in any letter case: "GB" is 10**9 bytes, "GiB" and "g" are 2**30. Without a unit,
    texts below a mebibyte ("48") and integers below a page of 4096 bytes raise an error, except for
    0 and ``Bytes``. ``name`` is the name of the value in error messages.
    """
    if isinstance(value, str):
        size = _parse_text(value, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
        if 0 < size < _LEAST_NUMBER and not isinstance(value, Bytes):
            message = f"{name}={size} has no unit, and is too little to be bytes. Give {_EXAMPLES}."
            raise OptionError(message)
    else:
        message = f"{name}={abbreviated(value)} is not a size. Give {_EXAMPLES}."
        raise OptionError(message)
    if not 0 <= size < _MOST:
        problem = "negative" if size < 0 else "more than any machine has"
        message = f"{name}={abbreviated(value)} is {problem}. Give {_EXAMPLES}."
        raise OptionError(message)
    return Bytes(size)


Size = Annotated[int | str, parse_size]
"""The annotation of a field that ``fields.check_fields`` reads as a number of bytes."""


def format_bytes(count: int) -> str:
    """Return ``count`` bytes in the binary unit that fits: ``57.2 GiB``, ``17 B``."""
    sign, size = ("-", -count) if count < 0 else ("", count)
    if size < 1024:
        return f"{sign}{size} B"
    power = 1
    # Rounded before it is compared: 1023.96 KiB would print as "1024.0 KiB".
    while power < len(_BINARY) and round(size / 1024**power, 1) >= 1024:
        power += 1
    return f"{sign}{size / 1024**power:.1f} {_BINARY[power - 1]}"


def format_count(count: int, noun: str) -> str:
    """Return ``count`` things by their singular: ``1 file``, ``2 files``, ``9,000 elements``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


def _parse_text(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        message = f"{name}={abbreviated(text)} is not a size. Give {_EXAMPLES}."
        raise OptionError(message)
    number, unit = Decimal(match["number"]), match["unit"].lower()
    if not unit and number == int(number) and not 0 < number < _LEAST_TEXT:
        return int(number)
    if unit not in _FACTORS:
        units = ", ".join(("B", *_BINARY, *_DECIMAL))
        problem = f"the unit {abbreviated(match['unit'])}" if unit else "no unit"
        message = f"{name}={abbreviated(text)} has {problem}. Give one of {units}."
        raise OptionError(message)
    # In decimals, which are exact: a product of floats may lie just below its value.
    size: int = math.floor(number * _FACTORS[unit])
    return size
