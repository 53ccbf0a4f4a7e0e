"""The table of mutations is complete and true to the source; `make mutations` runs it."""

import ast

import pytest

from mutations.source import lines_of, mutated, waits
from mutations.table import MUTATIONS, Mutation
from tree import TESTS


def test_each_wait_has_a_mutation() -> None:
    covered = {(m.path, line) for m in MUTATIONS for line in lines_of(m)}
    lacking = [
        f"src/tensorstow/{path}:{line}" for path, line in waits() if (path, line) not in covered
    ]
    assert not lacking, "add to tests/mutations/table.py what is to fail without these"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.path}: {m.code.split()[0]}")
def test_a_mutation_is_a_program_and_its_test_exists(mutation: Mutation) -> None:
    compile(mutated(mutation), mutation.path, "exec")
    path, name = mutation.test.split("::")
    tree = ast.parse((TESTS / path).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name.partition("[")[0] in names
