"""``Key``: the values that one key of the configuration takes, and its support."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tensorstow.base.fields import FP32_MAX, number_of
from tensorstow.doorkit.keyword_table import Support


@dataclass(frozen=True, slots=True)
class ValueType:
    """The values of a key: ``allowed`` in words; ``take`` converts one or raises ValueError."""

    allowed: str
    take: Callable[[Any], Any]


def whole(least: int = 0, most: int | None = None) -> ValueType:
    """Return the type of whole numbers; a float such as 5e8 is one, 1.5 is not."""

    def take(value: object) -> int:
        amount = _number(value)
        if not amount.is_integer():
            raise ValueError
        # Return an int as it is: a float has only 53 bits.
        exact = value if isinstance(value, int) else int(amount)
        _within(exact, least, sys.maxsize if most is None else most)
        return exact

    return ValueType(f"a whole number, {_range(least, most)}", take)


def number(least: float = 0.0, most: float | None = None) -> ValueType:
    """Return the type of numbers that fp32 holds."""

    def take(value: object) -> float:
        amount = _number(value)
        _within(amount, least, most)
        return amount

    return ValueType(f"a number, {_range(least, most)}", take)


def positive() -> ValueType:
    """Return the type of numbers above zero that fp32 holds."""

    def take(value: object) -> float:
        amount = _number(value)
        if amount <= 0.0:
            raise ValueError
        return amount

    return ValueType("a number above 0", take)


def one_of(*names: str) -> ValueType:
    """Return the type of a few words, in any letter case."""

    def take(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in names:
            raise ValueError
        return value.lower()

    return ValueType("one of " + ", ".join(f'"{name}"' for name in names), take)


def _of(words: str, *types: type) -> ValueType:
    def take(value: object) -> object:
        if not isinstance(value, types) or (isinstance(value, str) and not value):
            raise ValueError
        return value

    return ValueType(words, take)


def _steps(value: object) -> int:
    # What writes inf means "never".
    return sys.maxsize if value == math.inf else int(whole(1).take(value))


def take_flag(value: object) -> bool:
    """Return a flag; 0 and 1 are taken as upstream takes them. Raises ValueError for others."""
    if not isinstance(value, int) or value not in {0, 1}:
        raise ValueError
    return bool(value)


BOOL = ValueType("true or false", take_flag)
TEXT = _of("a text that is not empty", str)
OBJECT = _of("an object, {...}", Mapping)
ANYTHING = ValueType("anything", lambda value: value)
STEPS = ValueType("a whole number, at least 1, or inf for never", _steps)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError  # noqa: TRY004  # as the other kinds
    return value


STRING = ValueType("a text", _string)


def is_off(value: object) -> bool:
    """Return whether a section is empty or has all its switches off."""
    if not isinstance(value, Mapping):
        return value is None or value is False
    switches = list(_switches(value))
    return not any(switches) if switches else not value


def _switches(section: Mapping[str, Any]) -> list[bool]:
    # DeepSpeed reads inner switches even if the outer one is off.
    enabled = section.get("enabled")
    switches = [bool(enabled) and enabled != "auto"] if "enabled" in section else []
    for value in section.values():
        if isinstance(value, Mapping):
            switches.extend(_switches(value))
    return switches


def _number(value: object) -> float:
    number = number_of(value)
    if number is None:
        raise ValueError
    return number


def _within(value: float, least: float, most: float | None) -> None:
    if value < least or (most is not None and value > most):
        raise ValueError


def _range(least: float, most: float | None) -> str:
    return f"at least {least}" if most is None else f"from {least} to {most}"


ANY_WHOLE = replace(whole(-sys.maxsize), allowed="a whole number")
ANY_NUMBER = replace(number(-FP32_MAX), allowed="a number")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a configuration: its path, values and support.

    ``off`` is the value if the key is absent, or that disables it. ``note`` is why it has no
    meaning, or what to do instead. ``spellings`` are older paths of the key, ``also`` other current
    ones. A path that ends in ``.*`` is a whole section.
    """

    path: str
    kind: ValueType
    off: Any
    support: Support
    note: str = ""
    spellings: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


def honoured(path: str, kind: ValueType, *spellings: str, off: object) -> Key:
    """Return a key that is honoured; ``off`` is its default."""
    return Key(path, kind, off, Support.HONOURED, spellings=spellings)


def idle(section: str, kind: ValueType, *names: str, why: str, off: object = None) -> list[Key]:
    """Return keys of a section that have no meaning here, all for one reason."""
    return [Key(section + name, kind, off, Support.NO_MEANING, why) for name in names]


def refused(path: str, kind: ValueType, *, off: object, instead: str) -> Key:
    """Return a key that is refused unless it has its ``off`` value."""
    return Key(path, kind, off, Support.REFUSED, instead)


def section(path: str, *, instead: str) -> Key:
    """Return a section that is refused if anything in it is enabled."""
    return Key(f"{path}.*", ANYTHING, None, Support.REFUSED, instead)


def with_prefix(prefix: str, keys: list[Key]) -> list[Key]:
    """Return the keys with their names without ``prefix`` as alternatives."""
    return [replace(k, also=(*k.also, k.path.replace(prefix, ""))) for k in keys]
