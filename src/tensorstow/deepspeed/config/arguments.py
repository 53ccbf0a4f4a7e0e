"""Reads what a configuration gives to a class, by the annotations of the class's constructor."""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from tensorstow.base.fields import hints_of, read_value
from tensorstow.deepspeed.config.key import BOOL


def arguments_of(
    cls: type, values: Mapping[str, Any], path: str, flags: Iterable[str] = ()
) -> dict[str, Any]:
    """Return keyword arguments for a class; raises OptionError for a value of another type.

    JSON writes a whole number as 1e3 too, and upstream takes 0 and 1 for false and true. ``flags``
    are true, false or null; another name that the constructor lacks is returned as it is.
    """
    hints = {**hints_of(cls), **dict.fromkeys(flags, bool | None)}
    return {
        name: read_value(hints.get(name, Any), _meant(hints.get(name), value), f"{path}.{name}")
        for name, value in values.items()
    }


def _meant(annotation: Any, value: object) -> object:
    kinds = get_args(annotation) or (annotation,)
    if bool in kinds and type(value) is int and value in {0, 1}:
        return BOOL.take(value)
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
