"""Parses JSON text with comments; an error points at its line and column."""

import base64
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Never

from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.base.regular_file import read_text

Source = str | os.PathLike[str] | Mapping[str, Any]

# A text without an end is one match, to the end of its line: else each quote in it is tried anew.
_TEXT_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_WORD = re.compile(r"[^\W\d]\w*")
_MOST_SLIPS = 20
_WIDEST = 200
"""The characters of a line that an error shows."""
_WRITTEN = {"True": "true", "False": "false", "None": "null"}


class _Slip(NamedTuple):
    at: int
    problem: str
    meant: str | None = None
    """The corrected text, of the same length; None if several corrections are possible."""


def load(source: Source) -> dict[str, Any]:
    """Return the object in a file, or a copy of a dict; raises OptionError."""
    if isinstance(source, Mapping):
        return dict(source)
    try:
        path = Path(source)
        text = read_text(path, "utf-8-sig")
    except (OSError, TypeError, ValueError) as error:
        encoded = _of_base64(source)
        if encoded is not None:
            return parse(encoded, "config, from base64,")
        why = getattr(error, "strerror", None) or error
        message = (
            f"config={abbreviated(source)} cannot be read ({why}). Pass a dict, the path of a"
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

    Raises OptionError with every error, but for those after 20, or after the first one that leaves
    the meaning unclear.
    """
    slips: list[_Slip] = []
    meant: str | None = _without_comments(text)
    value: object = None
    while meant is not None and len(slips) < _MOST_SLIPS:
        try:
            value = _value_of(meant, text, name)
        except json.JSONDecodeError as error:
            slips.append(_slip(meant, error))
            meant = slips[-1].meant
        else:
            break
    if slips:
        raise OptionError("\n".join(_pointing(text, name, slip) for slip in slips))
    if not isinstance(value, dict):
        message = f"{name} holds a {type(value).__name__}: a configuration is an object, {{...}}."
        raise OptionError(message)
    return value


def _value_of(meant: str, text: str, name: str) -> object:
    """Return the value of ``meant``, which is ``text`` without what is not JSON.

    Raises JSONDecodeError, or OptionError for what is JSON but no configuration.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twins(pairs, text, name)
        return dict(pairs)

    def constant(literal: str) -> Never:
        message = f"{name} has {literal}, which is not a number in JSON. Write a finite one."
        raise OptionError(message)

    try:
        value: object = json.loads(meant, object_pairs_hook=unique, parse_constant=constant)
    except (json.JSONDecodeError, OptionError):
        raise
    except ValueError as error:
        message = f"{name} has a number of more digits than Python reads. Write a smaller one."
        raise OptionError(message) from error
    except RecursionError as error:
        message = f"{name} is nested more deeply than any configuration. Take the original."
        raise OptionError(message) from error
    return value


def _without_comments(text: str) -> str:
    """Return a text of the same length, with blanks for comments, as upstream's parser has them."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0])

    return _TEXT_OR_COMMENT.sub(blank, text)


def _refuse_twins(pairs: list[tuple[str, Any]], text: str, name: str) -> None:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            lines = [i for i, line in enumerate(text.splitlines(), 1) if json.dumps(key) in line]
            line_numbers = ", ".join(map(str, lines))
            message = (
                f"{name} has {key!r} {count} times in one object (in line {line_numbers})."
                " Keep the one that is meant."
            )
            raise OptionError(message)


def _pointing(text: str, name: str, slip: _Slip) -> str:
    at = slip.at
    start = text.rfind("\n", 0, at) + 1
    number, column = text.count("\n", 0, at) + 1, at - start + 1
    start = max(start, at - _WIDEST // 2)
    line = text[start : start + _WIDEST].split("\n", 1)[0].rstrip()
    # Tabs stay tabs before the caret, so that it is below its character at any tab width.
    blank = re.sub(r"[^\t]", " ", text[start:at])
    return f"{name}, line {number}, column {column}: {slip.problem}.\n    {line}\n    {blank}^"


def _slip(text: str, error: json.JSONDecodeError) -> _Slip:
    """Return the error's position, which may be before the one that the parser reports."""
    at = error.pos
    while text[at : at + 1].isspace():
        at += 1
    return _comma_or_end(text, at, error.msg) or _other(text, at, error.msg)


def _comma_or_end(text: str, at: int, reason: str) -> _Slip | None:
    end = len(text[:at].rstrip())
    for comma in (at, end - 1):  # Python 3.13 reports the comma, older ones the position after it
        if text[comma : comma + 1] == "," and text[comma + 1 :].lstrip()[:1] in {"}", "]"}:
            problem = "this comma has nothing after it: remove it"
            return _Slip(comma, problem, _with(text, comma, " "))
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
        return _Slip(at, 'JSON quotes text with ": replace the single quotes')
    word = _WORD.match(text, at)
    if word and word[0] in _WRITTEN:
        json_word = _WRITTEN[word[0]]
        return _Slip(at, f"JSON writes {json_word}", _with(text, at, json_word))
    unquoted = None if word is None else f'{word[0]} has no quotes: write "{word[0]}"'
    return _Slip(at, unquoted or reason[0].lower() + reason[1:])


def _with(text: str, at: int, new: str) -> str:
    return text[:at] + new + text[at + len(new) :]
