"""Reads sizes such as "48GiB", and formats bytes and counts."""

import re
from decimal import Decimal

from tensorstow.base.errors import OptionError

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("kB", "MB", "GB", "TB", "PB")
_FACTORS = (
    {"b": 1}
    | {unit.lower(): 1024**power for power, unit in enumerate(_BINARY, start=1)}
    | {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL, start=1)}
)
_SIZE = re.compile(
    r"\s*(?P<number>-?\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE | re.ASCII
)
_EXAMPLES = 'a whole number of bytes, or a number with a unit such as "512MiB", "1.5 GiB" or "64GB"'


def parse_size(value: str | int, name: str = "size") -> int:
    """Return ``value`` in bytes, rounded down.

    Units may be in any letter case; "512M" is refused, as it may mean MB or MiB. ``name`` is the
    name of the value in error messages.
    """
    if isinstance(value, str):
        return _parse_text(value, name)
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"{name}={value!r} is not a size. Give {_EXAMPLES}."
        raise OptionError(message)
    if value < 0:
        message = f"{name}={value!r} is negative. Give {_EXAMPLES}."
        raise OptionError(message)
    return value


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
        message = f"{name}={text!r} is not a size. Give {_EXAMPLES}."
        raise OptionError(message)
    number, unit = Decimal(match["number"]), match["unit"].lower()
    if number < 0:
        message = f"{name}={text!r} is negative. Give {_EXAMPLES}."
        raise OptionError(message)
    if not unit and number == int(number):
        return int(number)
    if unit not in _FACTORS:
        known = ", ".join(("B", *_BINARY, *_DECIMAL))
        found = f"the unit {match['unit']!r}" if unit else "no unit"
        message = f"{name}={text!r} has {found}. Give one of {known}."
        raise OptionError(message)
    return int(number * _FACTORS[unit])
