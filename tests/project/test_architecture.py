"""ARCHITECTURE.md: its table is what the packages say, and the files that it names exist."""

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tree import ROOT

SOURCE = ROOT / "src" / "tensorstow"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def tool(name: str) -> ModuleType:
    """Return a program of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """Return the program that writes the table of packages."""
    return tool("architecture")


def test_the_table_of_packages_is_what_the_packages_say(writer: ModuleType) -> None:
    assert writer.BEGIN in TEXT
    assert writer.END in TEXT
    assert writer.written(TEXT) == TEXT, "run `make format`"
    named = set(re.findall(r"^\| `(\w+)` \|", TEXT.partition(writer.BEGIN)[2], re.MULTILINE))
    assert {init.parent.name for init in SOURCE.glob("*/__init__.py")} == named


def test_a_module_has_one_line_that_no_other_has(writer: ModuleType) -> None:
    said = Counter(re.findall(r"^\| `\w+` \| (.*) \|$", "\n".join(writer.modules()), re.MULTILINE))
    assert sum(said.values()) > 150
    assert not [line for line, count in said.items() if count > 1]


def test_at_most_300_lines_are_written_by_hand(writer: ModuleType) -> None:
    assert TEXT.partition(writer.BEGIN)[0].count("\n") <= 300


def test_imports_by_name_that_could_hide_a_cycle_are_reported(tmp_path: Path) -> None:
    checker = tool("imports")
    assert not list(checker.hidden_imports(SOURCE))
    text = 'import importlib\nimportlib.import_module("tensorstow.step.fused_kernel")\n'
    (tmp_path / "rule.py").write_text(text)
    (tmp_path / "other.py").write_text(text.replace("tensorstow.step.fused_kernel", "wandb"))
    assert list(checker.hidden_imports(tmp_path)) == ["rule.py:2: use an import statement"]


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
