"""Tests that count what the whole process holds keep what earlier tests left out of it."""

import ast
from pathlib import Path

import pytest

from tree import TESTS

COUNTS = frozenset(
    {
        "active_count",
        "max_memory_allocated",
        "memory_allocated",
        "open_descriptors",
        "pinned_bytes",
        "registered_bytes",
        "resident_bytes",
    }
)
"""Functions that return such a count."""
APART = "garbage_apart"
"""The fixture without which garbage of another test may be in one count and not in the next."""
FILES = [path for path in sorted(TESTS.rglob("test_*.py")) if path != Path(__file__)]


def names_called(function: ast.FunctionDef) -> set[str]:
    """Return the names of what a function calls."""
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = {each.id for each in called if isinstance(each, ast.Name)}
    return names | {each.attr for each in called if isinstance(each, ast.Attribute)}


def uncovered(source: str) -> list[str]:
    """Return the tests that count, by themselves or by a function beside them, without APART."""
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    counting = set(COUNTS)
    while more := {n for n, f in functions.items() if names_called(f) & counting} - counting:
        counting |= more
    marks = [node for node in tree.body if isinstance(node, ast.Assign)]
    if any(APART in ast.dump(node) for node in marks):
        return []
    return [
        name
        for name, function in functions.items()
        if name in counting - COUNTS
        and name.startswith("test_")
        and not any(APART in ast.dump(each) for each in function.decorator_list)
        and APART not in {argument.arg for argument in function.args.args}
    ]


def test_counts_are_compared_without_the_garbage_of_other_tests() -> None:
    found = {str(path.relative_to(TESTS)): uncovered(path.read_text("utf-8")) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("def test_a():\n    before = pinned_bytes()", ["test_a"]),
        ("def f(): return here.memory_allocated()\ndef test_a():\n    f()", ["test_a"]),
        ("@pytest.mark.usefixtures('garbage_apart')\ndef test_a():\n    pinned_bytes()", []),
        ("def test_a():\n    told = report.pinned_bytes", []),
    ],
)
def test_the_rule_finds_what_it_is_for(body: str, told: list[str]) -> None:
    assert uncovered(body) == told
