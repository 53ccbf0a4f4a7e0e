"""Checks the fields of dataclasses by their annotations, and reads dataclasses from JSON.

The annotation of a field says what it takes: ``int`` a whole number that is no bool, ``float`` a
number that fp32 holds, an enum a member or its value, a dataclass a mapping of its fields too, and
``Annotated[T, read]`` whatever ``read(value, name)`` returns.
"""

import contextlib
import json
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache, partial
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from tensorstow.base.errors import OptionError, abbreviated

T = TypeVar("T")
FP32_MAX = (2 - 2**-23) * 2.0**127
"""The largest number of fp32: what updates compute with is held in it."""
_MOST = 2**63
_WORDS: Mapping[Any, str] = {
    int: "a whole number below 2**63",
    float: f"a number up to {FP32_MAX:.2g}",
    bool: "True or False",
    str: "a text",
    NoneType: "None",
}


def check_fields(instance: object) -> None:
    """Check and convert every field of a frozen dataclass, as its ``__post_init__``.

    Raises:
        OptionError: A value that its annotation does not take.
    """
    cls: Any = type(instance)
    for name, annotation in _annotations(cls).items():
        object.__setattr__(instance, name, read_value(annotation, getattr(instance, name), name))


def json_object(text: str, meant: str) -> dict[str, Any]:
    """Return the object that a JSON text holds; ``meant`` says in errors what it should be.

    Raises:
        OptionError: The text is no JSON, or no object, or has a name twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_name = dict(pairs)
        if len(by_name) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in by_name if names.count(name) > 1)
            message = f"it has {twice!r} twice"
            raise ValueError(message)
        return by_name

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except (ValueError, TypeError, RecursionError) as error:
        message = f"{meant}: {error}."
        raise OptionError(message) from error
    if not isinstance(parsed, dict):
        message = f"{meant}: this is {abbreviated(parsed)}."
        raise OptionError(message)
    return parsed


def from_fields(cls: Callable[..., T], values: Mapping[str, Any], meant: str, path: str = "") -> T:
    """Return a dataclass made from the values of its fields, of which mappings are dataclasses.

    Args:
        cls: The dataclass.
        values: The values by name.
        meant: As of ``json_object``.
        path: The names in front of the fields' in errors.

    Raises:
        OptionError: A name that is no field, a field without a value, or a value that its
            annotation does not take.
    """
    annotations = _annotations(cls)
    for name in values:
        if name not in annotations:
            near = get_close_matches(str(name), annotations, 1)
            message = f"{meant}: it has no {path}{name}" + (f": {near[0]!r}?" if near else ".")
            raise OptionError(message)
    if missing := [name for name in _required(cls) if name not in values]:
        message = f"{meant}: this one lacks {', '.join(path + name for name in missing)}."
        raise OptionError(message)
    return cls(**{n: read_value(annotations[n], value, path + n) for n, value in values.items()})


def read_value(annotation: Any, value: Any, name: str) -> Any:  # noqa: ANN401  # any field's
    """Return a value as an annotation has it.

    Raises:
        OptionError: The annotation does not take the value, which the error calls ``name``.
    """
    if annotation is Any:
        return value
    if get_origin(annotation) is Annotated:
        return annotation.__metadata__[0](value, name)
    members = get_args(annotation) if get_origin(annotation) in {Union, UnionType} else ()
    if value is None and NoneType in members:
        return None
    kinds = [member for member in members if member is not NoneType]
    if len(kinds) == 1:
        return read_value(kinds[0], value, name)
    for member in kinds or [annotation]:
        with contextlib.suppress(_NotTakenError):
            return _take(member, value, name)
    *first, last = [word for member in members or [annotation] for word in _words(member)]
    return _refuse(value, name, f"{', '.join(first)} or {last}" if first else last)


def hints_of(cls: type) -> Mapping[str, Any]:
    """Return the annotations of what a class is made from, by name.

    Classes of torch name types that they do not import.
    """
    return get_type_hints(cls.__init__, localns=vars(abc))  # type: ignore[misc]


def number_of(value: object) -> float | None:
    """Return a number if it is one that fp32 holds; None for NaN, inf, a bool and anything else."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= FP32_MAX else None


def whole_number(least: int, most: int = _MOST - 1) -> Callable[[object, str], int]:
    """Return the reader of whole numbers from ``least`` to ``most``, for ``Annotated``."""
    words = f"at least {least} and below 2**63" if most == _MOST - 1 else f"{least} to {most}"

    def read(value: object, name: str) -> int:
        try:
            number = _whole(value)
        except _NotTakenError:
            number = least - 1
        if not least <= number <= most:
            _refuse(value, name, f"a whole number, {words}")
        return number

    return read


def _number_that(holds: Callable[[float], bool], words: str) -> Callable[[object, str], float]:
    """Return the reader of numbers for which ``holds`` is true, for ``Annotated``."""

    def read(value: object, name: str) -> float:
        number = float(read_value(float, value, name))
        if not holds(number):
            _refuse(value, name, words)
        return number

    return read


PositiveInt = Annotated[int, whole_number(1)]
PositiveFloat = Annotated[float, _number_that(lambda n: n > 0.0, "a number above 0")]
NotNegativeFloat = Annotated[float, _number_that(lambda n: n >= 0.0, "a number, at least 0")]
Share = Annotated[float, _number_that(lambda n: 0.0 <= n <= 1.0, "a share, 0 to 1")]


class _NotTakenError(Exception):
    """An annotation does not take a value."""


@cache
def _annotations(cls: Any) -> Mapping[str, Any]:  # noqa: ANN401  # a dataclass
    """Return the annotations of a dataclass's fields, by name."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls)}


@cache
def _required(cls: Any) -> Sequence[str]:  # noqa: ANN401
    """Return the names of the fields without a default."""
    missing = [f for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    return [f.name for f in missing]


def _take(annotation: Any, value: Any, name: str) -> Any:  # noqa: ANN401
    """Return ``value`` as ``annotation``, which is no union, has it, or raise _NotTakenError."""
    arguments = get_args(annotation)
    kind = get_origin(annotation) or annotation
    if kind is Literal:
        return _one_of(arguments, value)
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if issubclass(kind, Enum):
        return _member(kind, value)
    if isinstance(value, Mapping) and is_dataclass(kind):
        return from_fields(annotation, value, f"{name} is read from a mapping", f"{name}.")
    if issubclass(kind, Sequence) or kind is Iterable:
        taken = _sequence(arguments, value, name)
        return list(taken) if kind is list else taken
    taken = _instance(kind, value)
    return _mapping(arguments, taken, name) if isinstance(taken, Mapping) and arguments else taken


def _sequence(kinds: Sequence[Any], value: object, name: str) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _NotTakenError
    if len(kinds) == 1 or kinds[-1] is ...:
        kinds = [kinds[0]] * len(value)
    if len(kinds) != len(value):
        raise _NotTakenError
    items = enumerate(zip(kinds, value, strict=True))
    return tuple(read_value(kind, item, f"{name}[{index}]") for index, (kind, item) in items)


def _mapping(kinds: Sequence[Any], value: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    of_key, of_value = kinds
    return {
        read_value(of_key, key, f"a key of {name}"): read_value(
            of_value, item, f"{name}[{abbreviated(key)}]"
        )
        for key, item in value.items()
    }


def _instance(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise _NotTakenError
    return value


def _one_of(choices: Iterable[object], value: object) -> object:
    for choice in choices:
        # Types are compared too: True equals 1, and 1.0 does.
        if type(value) is type(choice) and value == choice:
            return choice
    raise _NotTakenError


def _member(kind: type[Enum], value: object) -> Enum:
    if isinstance(value, kind | str):
        with contextlib.suppress(ValueError):
            return kind(value)
    raise _NotTakenError


def _whole(value: object) -> int:
    # A bool is an Integral, and is meant as no number.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _NotTakenError
    number = int(value)
    if not -_MOST <= number < _MOST:
        raise _NotTakenError
    return number


def _number(value: object) -> float:
    number = number_of(value)
    if number is None:
        raise _NotTakenError
    return number


_SCALARS: Mapping[Any, Callable[[object], object]] = {
    bool: partial(_instance, bool),
    int: _whole,
    float: _number,
    str: partial(_instance, str),
}


def _words(annotation: Any) -> list[str]:  # noqa: ANN401
    """Return what an annotation takes, in words."""
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices]
    kind = get_origin(annotation) or annotation
    if kind in _WORDS:
        return [_WORDS[kind]]
    if issubclass(kind, Enum):
        return [f'"{member.value}"' for member in kind]
    if issubclass(kind, Mapping):
        return ["a mapping"]
    arguments = get_args(annotation)
    if issubclass(kind, tuple) and ... not in arguments:
        return [f"a list of {len(arguments)}"]
    is_list = issubclass(kind, Sequence) or kind is Iterable
    return ["a list" if is_list else f"an instance of {kind.__name__}"]


def _refuse(value: object, name: str, allowed: str) -> NoReturn:
    message = f"{name}={abbreviated(value)} was given: it is {allowed}."
    raise OptionError(message)
