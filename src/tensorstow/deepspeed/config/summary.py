"""A table of what becomes of each key: honoured, ignored or refused."""

import json
from collections.abc import Iterator
from typing import NamedTuple

from tensorstow.base.errors import abbreviated
from tensorstow.deepspeed.config.json_text import Source, load
from tensorstow.deepspeed.config.key import is_off
from tensorstow.deepspeed.config.settings import KEYS
from tensorstow.deepspeed.config.values import AUTO, GivenKey, given_keys
from tensorstow.doorkit.keyword_table import Support

_WIDEST = 40


class SummaryLine(NamedTuple):
    """A key as it is written, its value, and how it is treated."""

    path: str
    value: str
    answer: str


def summary_of(source: Source) -> str:
    """Return a table of what becomes of each key of a configuration.

    Values are not refused here, so that a configuration can be checked before a run.

    Args:
        source: A JSON file or a dict.

    Returns:
        One line per key: its path, its value, and whether it is honoured, has no meaning, or is
            refused.

    Raises:
        OptionError: An error in the JSON, or an unknown key.
    """
    lines = [SummaryLine("key", "value", "answer"), *lines_of(source)]
    path, value = (max(len(line[column]) for line in lines) for column in (0, 1))
    return "\n".join(f"{n.path:<{path}}  {n.value:<{value}}  {n.answer}" for n in lines)


def lines_of(source: Source) -> Iterator[SummaryLine]:
    """Yield a line for every key: honoured ones, those without a meaning, refused ones."""
    order, supports = list(KEYS), list(Support)
    keys = [one for one in given_keys(load(source)) if one.value is not None]
    keys.sort(key=lambda one: (supports.index(one.key.support), order.index(one.key.path)))
    for one in keys:
        yield SummaryLine(one.path, _shown(one.value), _answer(one))


def _answer(one: GivenKey) -> str:
    key = one.key
    if key.support is Support.HONOURED:
        now = "" if one.path in {key.path, *key.also} else f", as {key.path}"
        return f"{key.support.value}{now}" + (", once it is filled in" if one.value == AUTO else "")
    if one.value in (AUTO, key.off) or (key.path.endswith("*") and is_off(one.value)):
        return "asks for nothing"
    return f"{key.support.value}: {key.note}"


def _shown(value: object) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except (ValueError, TypeError, RecursionError):  # a dict may hold what JSON does not
        text = abbreviated(value)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 3] + "..."
