"""JSON text to a dict: a slip is shown where it was made."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

from tensorstow.base.errors import OptionError

Source = str | os.PathLike[str] | Mapping[str, Any]

_FOREIGN = {
    "'": 'JSON quotes text with ": exchange the single quotes',
    "/": "JSON has no comments: take this one away",
    "#": "JSON has no comments: take this one away",
    "T": "JSON writes true",
    "F": "JSON writes false",
    "N": "JSON writes null, and has no NaN",
}


def load(source: Source) -> dict[str, Any]:
    """Return the object that a file holds, or a copy of a dict; raises OptionError."""
    if isinstance(source, Mapping):
        return dict(source)
    try:
        path = Path(source)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, TypeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = (
            f"config={source!r} cannot be read ({why}). Pass a dict, or the path of a"
            " JSON file in UTF-8."
        )
        raise OptionError(message) from error
    return parse(text, str(path))


def parse(text: str, name: str) -> dict[str, Any]:
    """Return the object that ``text`` is; ``name`` is the file's, for the error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twins(pairs, text, name)
        return dict(pairs)

    def constant(found: str) -> Never:
        message = f"{name} has {found}, which is no number in JSON. Write a finite one."
        raise OptionError(message)

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise OptionError(_pointing(text, name, error)) from None
    if not isinstance(value, dict):
        message = f"{name} holds a {type(value).__name__}: a configuration is an object, {{...}}."
        raise OptionError(message)
    return value


def _refuse_twins(pairs: list[tuple[str, Any]], text: str, name: str) -> None:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            lines = [i for i, line in enumerate(text.splitlines(), 1) if json.dumps(key) in line]
            where = ", ".join(map(str, lines))
            message = (
                f"{name} has {key!r} {count} times in one object (it stands in line {where})."
                " Keep the one that is meant."
            )
            raise OptionError(message)


def _pointing(text: str, name: str, error: json.JSONDecodeError) -> str:
    at, what = _slip(text, error)
    start = text.rfind("\n", 0, at) + 1
    line = text[start:].split("\n", 1)[0].rstrip()
    number, column = text.count("\n", 0, at) + 1, at - start + 1
    # Tabs stay tabs before the caret: it stands under its character however wide they are.
    blank = re.sub(r"[^\t]", " ", text[start:at])
    return f"{name}, line {number}, column {column}: {what}.\n    {line}\n    {blank}^"


def _slip(text: str, error: json.JSONDecodeError) -> tuple[int, str]:
    """Return where the writer slipped, which may be before where the parser noticed."""
    at = error.pos
    before = text[:at].rstrip()
    illegal = error.msg.startswith("Illegal trailing comma")
    if illegal or (text[at : at + 1] in {"}", "]"} and before.endswith(",")):
        return at if illegal else len(before) - 1, "this comma has nothing after it: take it away"
    for sign, advice in _FOREIGN.items():
        if text.startswith(sign, at):
            return at, advice
    if "',' delimiter" in error.msg and before:
        return len(before), "a comma is missing here"
    if error.msg == "Extra data":
        return at, "the configuration has ended before this: one {...} is all of it"
    ended = "the text ends here: a brace or bracket is still open"
    return (len(before), ended) if at >= len(text) else (at, error.msg[0].lower() + error.msg[1:])
