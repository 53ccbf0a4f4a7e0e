"""``Key``: the values that one key of the configuration takes, and its support.

[Note: One section] A section of the configuration is a frozen dataclass. A field of it is a key
that has an effect, with its default; ``other_keys`` are the rest. Paths are relative to the
section. Reading, the checks, the log, the summary and the page of keys come from it.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
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


def _of(words: str, kind: type, *, refused: object = None) -> ValueType:
    def take(value: object) -> object:
        if not isinstance(value, kind) or value == refused:
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
TEXT = _of("a text that is not empty", str, refused="")
STRING = _of("a text", str)
OBJECT = _of("an object, {...}", Mapping)
ANYTHING = ValueType("anything", lambda value: value)
STEPS = ValueType("a whole number, at least 1, or inf for never", _steps)


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
    off: Any = None
    support: Support = Support.HONOURED
    note: str = ""
    spellings: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def within(self, section: str) -> "Key":
        """Return the key with whole paths, if they are relative to a section."""
        spellings, also = (
            tuple(section + p for p in paths) for paths in (self.spellings, self.also)
        )
        return replace(self, path=section + self.path, spellings=spellings, also=also)


Keys = tuple[Key, ...]


def idle(kind: ValueType, *paths: str, why: str, off: object = None) -> Keys:
    """Return keys that have no meaning here, all for one reason."""
    return tuple(Key(path, kind, off, Support.NO_MEANING, why) for path in paths)


def refused(kind: ValueType, *paths: str, off: object, instead: str) -> Keys:
    """Return keys that are refused unless they have their ``off`` value."""
    return tuple(Key(path, kind, off, Support.REFUSED, instead) for path in paths)


def refused_sections(*paths: str, instead: str) -> Keys:
    """Return sections that are refused if anything in them is enabled."""
    return refused(ANYTHING, *(f"{path}.*" for path in paths), off=None, instead=instead)


def setting(kind: ValueType, off: object = None, *spellings: str, **key: Any) -> Any:
    """Return a section's field that is read from a key.

    ``key`` has other fields of ``Key``; its path is the field's name by default.
    """
    return field(default=off, metadata={"key": (kind, off, spellings, key)})


def part(cls: type, path: str) -> Any:
    """Return a section's field that is a section too, in an object at ``path``."""
    return field(default_factory=cls, metadata={"part": (cls, f"{path}.")})


def optional(cls: type, path: str) -> Any:
    """Return a section's field that is another section, or None, which ``section_of`` leaves."""
    return field(default=None, metadata={"keys": (cls, f"{path}.")})


def keys_of(cls: Any, path: str = "") -> Iterator[Key]:
    """Yield all keys of a section at ``path``: of its fields, then those in its ``others``."""
    for one in fields(cls):
        if "key" in one.metadata:
            yield _key_of(one).within(path)
        elif inner := one.metadata.get("part") or one.metadata.get("keys"):
            yield from keys_of(inner[0], path + inner[1])
    yield from (key.within(path) for key in getattr(cls, "other_keys", ()))


def section_of(cls: Any, values: Mapping[str, Any], path: str = "", **made: Any) -> Any:
    """Return a section at ``path`` from the values of keys, and from fields that are ``made``."""
    for one in fields(cls):
        if "key" in one.metadata:
            made[one.name] = values[path + _key_of(one).path]
        elif "part" in one.metadata:
            inner, name = one.metadata["part"]
            made.setdefault(one.name, section_of(inner, values, path + name))
    return cls(**made)


def _key_of(one: Field[Any]) -> Key:
    kind, off, spellings, key = one.metadata["key"]
    return Key(**{"path": one.name, "kind": kind, "off": off, "spellings": spellings, **key})
