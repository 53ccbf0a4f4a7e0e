"""A class name has one meaning in the whole tree, Python and C++ together."""

import ast
import re
from collections import defaultdict

import pytest

from tree import ROOT

BOTH_SIDES = {"Family", "Part", "Segment", "StateFormat", "StreamSpec"}
"""One thing that Python describes and the native core is given: one class on either side."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CPP_CLASS = re.compile(
    r"^[ \t]*(?:enum[ \t]+)?(?:class|struct)[ \t]+(?:alignas\([^)]*\)[ \t]*)?(?P<name>\w+)"
    r"(?:[ \t]+final)?(?:[ \t]*:(?!:)[^;{]*)?\s*\{",
    re.MULTILINE,
)


def python_classes(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def cpp_classes(source: str) -> list[str]:
    return [match["name"] for match in _CPP_CLASS.finditer(_COMMENT.sub("", source))]


def reused(python: dict[str, list[str]], cpp: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the names that are defined more than once, and where."""
    found = {}
    for name in python.keys() | cpp.keys():
        places = python.get(name, []) + cpp.get(name, [])
        mirrored = name in BOTH_SIDES and len(python.get(name, [])) == len(cpp.get(name, [])) == 1
        if len(places) > 1 and not mirrored:
            found[name] = sorted(places)
    return found


def test_no_class_name_is_used_twice() -> None:
    python: dict[str, list[str]] = defaultdict(list)
    cpp: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in python_classes(path.read_text()):
            python[name].append(str(path.relative_to(ROOT)))
    for path in sorted((ROOT / "csrc").rglob("*.[ch]*")):
        # One implementation for each instruction set has the same classes: that is its contract.
        if "tests" not in path.parts and not path.name.startswith("simd_"):
            for name in cpp_classes(path.read_text()):
                cpp[name].append(str(path.relative_to(ROOT)))
    found = reused(python, cpp)
    assert not found


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("struct Chunk {", ["Chunk"]),
        ("enum class State : uint8_t { kFree };", ["State"]),
        ("class Engine final : public Base {", ["Engine"]),
        ("  struct Inner\n  {", ["Inner"]),
        ("struct Chunk;", []),
        ("struct Pipeline::Impl {", []),  # qualified: a part of the class that it is named by
        ("template <class T> void f(struct stat* s) {", []),
        ("// class Old {", []),
    ],
)
def test_classes_of_cpp_are_found(source: str, names: list[str]) -> None:
    assert cpp_classes(source) == names


def test_a_second_meaning_is_found() -> None:
    both = reused({"Run": ["a.py", "b.py"], "Part": ["a.py"]}, {"Part": ["c.h"], "Run": ["c.h"]})
    assert both == {"Run": ["a.py", "b.py", "c.h"]}
    assert reused({"Part": ["a.py", "b.py"]}, {"Part": ["c.h"]}).keys() == {"Part"}
