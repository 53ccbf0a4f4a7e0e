"""Finds a generation by number or snapshot name, and those that may be dropped."""

from collections.abc import Sequence
from typing import TypeVar

from tensorstow.base.errors import OptionError
from tensorstow.store.records import Generation, Summary

_T = TypeVar("_T", Summary, Generation)


def find(generations: Sequence[_T], which: str | int) -> _T:
    """Return the generation with that number or snapshot's name."""
    for summary in generations:
        if which == summary.number or which in summary.names:
            return summary
    listed = ", ".join(
        f"{summary.number} ({', '.join(summary.names)})" if summary.names else str(summary.number)
        for summary in generations
    )
    asked = f"snapshot {which!r}" if isinstance(which, str) else f"generation {which}"
    message = f"The {asked} was requested and is not there. There are: {listed or 'none at all'}."
    raise OptionError(message)


def droppable(generations: Sequence[Summary], keep: int | None = None) -> list[int]:
    """Return the generations that no snapshot pins, but for the one with number ``keep``."""
    return [s.number for s in generations if not s.names and s.number != keep]


def check_name(generations: Sequence[Summary], name: str, number: int | None) -> Summary:
    """Return the generation (the newest) to call ``name``, which must be new and a name."""
    # Checked here, for an error in the middle of the transaction would end the store.
    if not is_name(name):
        message = (
            f"A snapshot {name!r} was requested: give a name of printable characters with a letter"
            " in it."
        )
        raise OptionError(message)
    if not generations:
        message = f"A snapshot {name!r} was requested and nothing is committed yet: commit first."
        raise OptionError(message)
    for summary in generations:
        if name in summary.names:
            message = (
                f"A snapshot {name!r} was requested and generation {summary.number} has that name:"
                " drop it first, or give another one."
            )
            raise OptionError(message)
    return generations[-1] if number is None else find(generations, number)


def is_name(name: object) -> bool:
    """Return whether the command can print it, SQLite can keep it, and it is no number."""
    return (
        isinstance(name, str) and bool(name.strip()) and name.isprintable() and not name.isdigit()
    )
