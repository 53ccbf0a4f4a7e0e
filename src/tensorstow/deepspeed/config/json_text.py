"""Parses JSON text with comments; an error points at its line and column."""

import base64
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Never

from tensorstow.base.errors import OptionError

Source = str | os.PathLike[str] | Mapping[str, Any]

_TEXT_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_WORD = re.compile(r"[^\W\d]\w*")
_WRITTEN = {"True": "true", "False": "false", "None": "null"}


class _Slip(NamedTuple):
    at: int
    what: str
    meant: str | None = None
    """The text without it, as long as it was, where there is no doubt."""


def load(source: Source) -> dict[str, Any]:
    """Return the object in a file, or a copy of a dict; raises OptionError."""
    if isinstance(source, Mapping):
        return dict(source)
    try:
        path = Path(source)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, TypeError, ValueError) as error:
        encoded = _of_base64(source)
        if encoded is not None:
            return parse(encoded, "config, from base64,")
        why = error.strerror if isinstance(error, OSError) else error
        message = (
            f"config={source!r} cannot be read ({why}). Pass a dict, the path of a"
            " JSON file in UTF-8, or one in base64."
        )
        raise OptionError(message) from error
    return parse(text, str(path))


def _of_base64(source: object) -> str | None:
    """Return the text of an object that is given in base64, as launchers do; None: it is none."""
    try:
        text = base64.urlsafe_b64decode(source).decode() if isinstance(source, str) else ""
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


def parse(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON object; ``name`` is the file's name in errors.

    Raises OptionError with every error up to the first one after which the meaning is not clear.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twins(pairs, text, name)
        return dict(pairs)

    def constant(found: str) -> Never:
        message = f"{name} has {found}, which is no number in JSON. Write a finite one."
        raise OptionError(message)

    slips: list[_Slip] = []
    meant: str | None = _without_comments(text)
    value: object = None
    while meant is not None:
        try:
            value = json.loads(meant, object_pairs_hook=unique, parse_constant=constant)
        except json.JSONDecodeError as error:
            slips.append(_slip(meant, error))
            meant = slips[-1].meant
        except RecursionError as error:
            message = f"{name} is nested more deeply than any configuration. Take the original."
            raise OptionError(message) from error
        else:
            break
    if slips:
        raise OptionError("\n".join(_pointing(text, name, slip) for slip in slips))
    if not isinstance(value, dict):
        message = f"{name} holds a {type(value).__name__}: a configuration is an object, {{...}}."
        raise OptionError(message)
    return value


def _without_comments(text: str) -> str:
    """Return a text of the same length, with blanks for comments, as upstream's parser has them."""

    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0])

    return _TEXT_OR_COMMENT.sub(blank, text)


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


def _pointing(text: str, name: str, slip: _Slip) -> str:
    at = slip.at
    start = text.rfind("\n", 0, at) + 1
    line = text[start:].split("\n", 1)[0].rstrip()
    number, column = text.count("\n", 0, at) + 1, at - start + 1
    # Tabs stay tabs before the caret: it stands under its character however wide they are.
    blank = re.sub(r"[^\t]", " ", text[start:at])
    return f"{name}, line {number}, column {column}: {slip.what}.\n    {line}\n    {blank}^"


def _slip(text: str, error: json.JSONDecodeError) -> _Slip:
    """Return where the error is, which may be before the position that the parser reports."""
    at = error.pos
    while text[at : at + 1].isspace():
        at += 1
    return _comma_or_end(text, at, error.msg) or _other(text, at, error.msg)


def _comma_or_end(text: str, at: int, reason: str) -> _Slip | None:
    end = len(text[:at].rstrip())
    for comma in (at, end - 1):  # Python 3.13 is at the comma, older ones are behind it
        if text[comma : comma + 1] == "," and text[comma + 1 :].lstrip()[:1] in {"}", "]"}:
            what = "this comma has nothing after it: take it away"
            return _Slip(comma, what, _with(text, comma, " "))
    if at >= len(text):
        return _Slip(end, "the text ends here: a brace or bracket is still open")
    if "',' delimiter" in reason:
        clear = end < at and text[at] == '"'
        return _Slip(end, "a comma is missing here", _with(text, end, ",") if clear else None)
    return None


def _other(text: str, at: int, reason: str) -> _Slip:
    if reason == "Extra data":
        return _Slip(at, "the configuration has ended before this: one {...} is all of it")
    if text[at] == "'":
        return _Slip(at, 'JSON quotes text with ": exchange the single quotes')
    word = _WORD.match(text, at)
    if word and word[0] in _WRITTEN:
        known = _WRITTEN[word[0]]
        return _Slip(at, f"JSON writes {known}", _with(text, at, known))
    what = f'{word[0]} has no quotes: write "{word[0]}"' if word else reason[0].lower() + reason[1:]
    return _Slip(at, what)


def _with(text: str, at: int, new: str) -> str:
    return text[:at] + new + text[at + len(new) :]
