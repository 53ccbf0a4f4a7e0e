"""What the classes of C++ source define, read without a compiler."""

import re

_NOT_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL | re.MULTILINE
)
_CLASS = re.compile(
    r"(?<!enum )\b(?:class|struct)\s+(?:alignas\([^)]*\)\s*)?(?P<name>\w+)(?:\s+final)?\s*"
    r"(?::(?!:)[^;{(]*)?\{"
)
_ARGUMENTS = re.compile(r"<[^<>;]*>")  # of templates
_METHOD = re.compile(
    r"(?P<name>operator\s*(?:\(\)|[^\s\w(]+|[\w:]+)|~?\b(?!alignas|noexcept|decltype|requires)\w+)"
    r"\s*\(\)(?!\s*\(\))"
)


def _end(source: str, begin: int) -> int:
    """Return where the bracket that opens at ``begin`` is closed."""
    depth = 0
    for at in range(begin, len(source)):
        depth += (source[at] in "{(") - (source[at] in "})")
        if depth == 0:
            return at
    message = "a bracket is never closed"
    raise ValueError(message)


def _statements(body: str) -> list[str]:
    """Return what stands between the braces of a class, with every bracket's inside left out."""
    flat, at = "", 0
    while at < len(body):
        flat += body[at]
        if body[at] in "{(":
            at = _end(body, at)
            flat += body[at]
        at += 1
    return re.split(r";|\{\}", flat)


def _method(statement: str) -> str | None:
    while (shorter := _ARGUMENTS.sub("", statement)) != statement:
        statement = shorter
    found = _METHOD.search(statement)
    if found is None or re.search(r"\b(friend|using|static_assert)\b|=\s*delete", statement):
        return None
    # What is called behind an "=" gives a member its first value.
    return None if "=" in statement[: found.start()] else found["name"]


def cpp_methods(source: str) -> dict[str, set[str]]:
    """Return the methods that each class defines: constructors too, overloads once.

    Args:
        source: A header, or any file of C++ whose brackets match without its strings.

    Returns:
        Names of methods, by the class's own name; deleted ones and friends are left out.
    """
    code = _NOT_CODE.sub("", source)
    classes = {}
    for found in _CLASS.finditer(code):
        body = code[found.end() : _end(code, found.end() - 1)]
        names = {name for part in _statements(body) if (name := _method(part)) is not None}
        classes[found["name"]] = names
    return classes
