"""ARCHITECTURE.md: its tables have every module of the rooms that they describe, and no other."""

import re
from itertools import chain
from pathlib import Path

import pytest

from tree import ROOT

SOURCE = ROOT / "src" / "tensorstow"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
FILES = ("store", "fsdp", "planner", "optim/generic")
"""Rooms with a table of their own, a row for a file or a few."""
NOUNS = ("tensors", "formats", "states", "step", "checkpoint", "optim")
"""Rooms with one row in a table."""


def modules_of(room: str) -> set[str]:
    return {p.stem for p in (SOURCE / room).glob("*.py")} - {"__init__"}


def table_behind(words: str) -> list[list[str]]:
    """Return the rows of the first table behind ``words``, each by its cells."""
    lines = TEXT[TEXT.index(words) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([\w/]+)`", cell)


@pytest.mark.parametrize("room", FILES)
def test_a_table_of_files_has_every_module_once(room: str) -> None:
    rows = table_behind(f"Inside `{room}`")
    named = list(chain.from_iterable(names_in(first) for first, *_ in rows))
    assert sorted(named) == sorted(modules_of(room))


def test_a_table_of_deepspeed_has_every_module_once() -> None:
    """In two tables, and its folders' modules by their paths."""
    rows = table_behind("Inside `deepspeed`")
    named = set(chain.from_iterable(names_in(first) for first, *_ in rows))
    assert named == modules_of("deepspeed/config")
    rows = table_behind("`runtime/` and `ops/` have the paths")
    named = set(chain.from_iterable(names_in(first) for first, *_ in rows))
    assert {name for name in named if "/" not in name} == modules_of("deepspeed")


@pytest.mark.parametrize("room", NOUNS)
def test_a_row_of_nouns_names_every_module(room: str) -> None:
    rows = table_behind("Inside the rooms of an optimizer")
    nouns = next(nouns for first, nouns in rows if first == f"`{room}`")
    lacking = modules_of(room) - set(names_in(nouns))
    assert not lacking


def test_files_that_are_named_are_there() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|h))`", TEXT))
    assert named
    roots = (ROOT, SOURCE, ROOT / "tests")
    lacking = [name for name in named if not any((Path(r) / name).is_file() for r in roots)]
    assert not lacking


def test_it_begins_with_a_picture() -> None:
    first = TEXT.index("```")
    assert TEXT[first:].startswith("```mermaid")
    assert first < TEXT.index("\n## ")
