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

from tensorstow.base.fields import number_of
from tensorstow.doorkit.keyword_table import Support


@dataclass(frozen=True, slots=True)
class ValueType:
    """The values of a key: ``allowed`` in words; ``take`` converts one or raises ValueError."""

    allowed: str
    take: Callable[[Any], Any]


def _checked(allowed: str, read: Callable[[Any], Any], holds: Callable[[Any], bool]) -> ValueType:
    """Return the type of what ``read`` returns, if ``holds`` is true of it."""

    def take(value: object) -> Any:
        taken = read(value)
        if not holds(taken):
            raise ValueError
        return taken

    return ValueType(allowed, take)


def whole(least: int = 0, most: int | None = None) -> ValueType:
    """Return the type of whole numbers; a float such as 5e8 is one, 1.5 is not."""
    limit = sys.maxsize if most is None else most
    return _checked(f"a whole number, {_range(least, most)}", _whole, lambda n: least <= n <= limit)


def number(least: float = 0.0, most: float | None = None) -> ValueType:
    """Return the type of numbers that fp32 holds."""
    limit = math.inf if most is None else most
    return _checked(f"a number, {_range(least, most)}", _number, lambda n: least <= n <= limit)


def positive() -> ValueType:
    """Return the type of numbers above zero that fp32 holds."""
    return _checked("a number above 0", _number, lambda n: n > 0.0)


def one_of(*names: str) -> ValueType:
    """Return the type of a few words, in any letter case."""
    allowed = "one of " + ", ".join(f'"{name}"' for name in names)
    return _checked(allowed, lambda v: isinstance(v, str) and v.lower(), names.__contains__)


def _number(value: object) -> float:
    number = number_of(value)
    if number is None:
        raise ValueError
    return number


def _whole(value: object) -> int:
    amount = _number(value)
    if not amount.is_integer():
        raise ValueError
    # An int is returned as it is: a float has only 53 bits.
    return value if isinstance(value, int) else int(amount)


def _range(least: float, most: float | None) -> str:
    return f"at least {least}" if most is None else f"from {least} to {most}"


def _steps(value: object) -> int:
    # What writes inf means "never".
    return sys.maxsize if value == math.inf else int(whole(1).take(value))


def take_flag(value: object) -> bool:
    """Return a flag; 0 and 1 are taken as upstream takes them. Raises ValueError for others."""
    if not isinstance(value, int) or value not in {0, 1}:
        raise ValueError
    return bool(value)


BOOL = ValueType("true or false", take_flag)
ANYTHING = ValueType("anything", lambda value: value)
ANY_NUMBER = ValueType("a number", _number)
ANY_WHOLE = _checked("a whole number", _whole, lambda n: abs(n) <= sys.maxsize)
TEXT = _checked("a text that is not empty", ANYTHING.take, lambda v: isinstance(v, str) and v != "")
STRING = _checked("a text", ANYTHING.take, lambda v: isinstance(v, str))
OBJECT = _checked("an object, {...}", ANYTHING.take, lambda v: isinstance(v, Mapping))
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
