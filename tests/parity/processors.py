"""The tests of equal bits with the kernels of other processors, in `make soak`.

Torch's libraries choose kernels by the processor, and these variables let them choose as on another
one. MKL obeys MKL_ENABLE_INSTRUCTIONS on processors of Intel alone; MKL_CBWR=COMPATIBLE takes
kernels that all processors have. What is equal with some kernels only is no promise, but a bound.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tree import ROOT, TESTS

VALUES: Mapping[str, tuple[str, ...]] = {
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX2", "AVX512_CORE"),
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX2", "AVX512"),
    "MKL_CBWR": ("COMPATIBLE",),
}
OLDEST = {name: values[0] for name, values in VALUES.items()}
PROCESSORS = [OLDEST, *({name: value} for name, values in VALUES.items() for value in values)]
EXEMPT = {
    "tests/faults": "a run that is killed or damaged, and the same run: tests/unit has both",
    "tests/gpu": "kernels of an accelerator",
    "tests/programs": "whole programs: what they call is compared in tests/unit",
    "tests/unit/io": "bytes that are written and read, which no kernel computes",
    "tests/unit/store": "bytes that are written and read, which no kernel computes",
    "tests/unit/tensornvme": "bytes that are written and read, which no kernel computes",
}
"""Rooms of tests of equal bits that are not run, and why."""
ALSO = ("tests/properties/test_formats_train.py", "tests/unit/formats/test_reference.py")
"""Files that compare floats of Python, which stand for the bits."""
ROOMS = tuple(f"{room}/" for room in EXEMPT)
_COMPARES = re.compile(r"\b(torch\.equal|all_equal|assert_same|tobytes)\(")


def files_of_equal_bits() -> list[str]:
    """Return the test files that compare bits, themselves or by modules of the tests they import.

    Those of ``ALSO`` are added, and those in a room of ``EXEMPT`` left out.
    """
    files = {str(p.relative_to(ROOT)) for p in TESTS.rglob("test_*.py") if compares_bits(p)}
    return sorted({file for file in files if not file.startswith(ROOMS)} | {*ALSO})


def compares_bits(path: Path) -> bool:
    """Return whether a module of the tests, or one that it imports, compares bits."""
    modules, left = set[Path](), [path]
    while left:
        modules.add(left[-1])
        left += _imported(left.pop()) - modules
    return any(map(_has_comparison, modules))


@cache
def _has_comparison(path: Path) -> bool:
    # The functions of compare.py count where they are called.
    return path.name != "compare.py" and _COMPARES.search(path.read_text()) is not None


@cache
def _imported(path: Path) -> frozenset[Path]:
    """Return the modules of the tests that a module imports."""
    files = (TESTS / f"{name.replace('.', '/')}.py" for name in _names(ast.parse(path.read_text())))
    return frozenset(filter(Path.is_file, files))


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main() -> None:
    """Run them with each; exit by whether one failed."""
    failed, tests = [], files_of_equal_bits()
    for processor in PROCESSORS:
        name = " ".join(f"{variable}={value}" for variable, value in processor.items())
        print(name, flush=True)  # noqa: T201
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", *tests]
        if subprocess.run(command, env=os.environ | processor, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit("Tests failed with " + ", ".join(failed))


if __name__ == "__main__":
    main()
