"""A model four times as large as the host memory for its parameters trains from disk."""

import json
from pathlib import Path
from typing import Any

import children
from ranks import large

MIB = 1 << 20
BUDGET = large.UNITS * large.UNIT_BYTES // 4
AT_ONCE = 7
"""Copies of a unit: gathered twice, gradients, reduced ones; on the host while two are updated."""
SLACK = 40 * MIB
"""Threads, code that is loaded late, activations."""


STEPS = 2


def _trained(*arguments: object) -> dict[str, Any]:
    """Train in a process of its own; return what it held, within what the formula says."""
    done = children.run("-m", large.__name__, *map(str, (BUDGET, *arguments)))
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["disk"] == 4 * BUDGET
    assert found["pinned"] <= BUDGET
    assert found["grown"] < BUDGET + found["ring"] + AT_ONCE * large.UNIT_BYTES + SLACK
    assert found["grown"] < found["disk"]  # what it would hold of weights alone
    return found


def test_host_memory_is_what_the_formula_says_for_commits_and_resuming_too(tmp_path: Path) -> None:
    found = _trained(STEPS)
    assert found["losses"][-1] != found["losses"][0]
    # Forward and backward read each unit, but those still there; an update writes each.
    assert found["written"] == (STEPS + 1) * found["disk"]
    assert found["read"] < STEPS * 2 * found["disk"]
    # One step without a commit and one by hand; then one that commits, and one by hand again.
    first = _trained(1, tmp_path / "run")
    second = _trained(STEPS, tmp_path / "run")
    assert [*first["losses"], *second["losses"]] == found["losses"]
    # Made, and what was committed put in its place.
    assert second["written"] == (STEPS - 1 + 2) * found["disk"]
