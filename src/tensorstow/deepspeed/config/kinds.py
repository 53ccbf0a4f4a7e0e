"""What values a key takes, in words and as a function that checks one."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """``allowed`` in words; ``take`` returns the value as it is used, or raises ValueError."""

    allowed: str
    take: Callable[[Any], Any]


def whole(least: int = 0, most: int | None = None) -> Kind:
    """Return the kind of whole numbers; 5e8, a float in JSON, is one, and 1.5 is none."""

    def take(value: object) -> int:
        found = _number(value)
        if not found.is_integer():
            raise ValueError
        _within(found, least, most)
        # The int itself, where it is one: a float has 53 bits.
        return value if isinstance(value, int) else int(found)

    return Kind(f"a whole number, {_range(least, most)}", take)


def number(least: float = 0.0, most: float | None = None) -> Kind:
    """Return the kind of finite numbers."""

    def take(value: object) -> float:
        found = _number(value)
        _within(found, least, most)
        return found

    return Kind(f"a number, {_range(least, most)}", take)


def positive() -> Kind:
    """Return the kind of finite numbers above zero."""

    def take(value: object) -> float:
        found = _number(value)
        if found <= 0.0:
            raise ValueError
        return found

    return Kind("a number above 0", take)


def one_of(*names: str) -> Kind:
    """Return the kind of a few words, in any letter case."""

    def take(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in names:
            raise ValueError
        return value.lower()

    return Kind("one of " + ", ".join(f'"{name}"' for name in names), take)


def _of(words: str, *types: type) -> Kind:
    def take(value: object) -> object:
        if not isinstance(value, types) or (isinstance(value, str) and not value):
            raise ValueError
        return value

    return Kind(words, take)


def _steps(value: object) -> int:
    # What writes inf means "never".
    return sys.maxsize if value == math.inf else int(whole(1).take(value))


BOOL = _of("true or false", bool)
TEXT = _of("a text that is not empty", str)
OBJECT = _of("an object, {...}", Mapping)
ANYTHING = Kind("anything", lambda value: value)
STEPS = Kind("a whole number, at least 1, or inf for never", _steps)


def is_off(value: object) -> bool:
    """Return whether a whole section asks for nothing: empty, or none of its switches is on."""
    if not isinstance(value, Mapping):
        return value is None or value is False
    switches = list(_switches(value))
    return not any(switches) if switches else not value


def _switches(section: Mapping[str, Any]) -> list[bool]:
    # DeepSpeed looks at inner switches whatever the outer one says.
    own = section.get("enabled")
    found = [bool(own) and own != "auto"] if "enabled" in section else []
    for value in section.values():
        if isinstance(value, Mapping):
            found.extend(_switches(value))
    return found


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _within(value: float, least: float, most: float | None) -> None:
    if value < least or (most is not None and value > most):
        raise ValueError


def _range(least: float, most: float | None) -> str:
    return f"at least {least}" if most is None else f"from {least} to {most}"
