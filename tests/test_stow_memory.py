"""A model four times as large as the host memory for its parameters trains from disk."""

import json
import subprocess
import sys
from pathlib import Path

from ranks import large

MIB = 1 << 20
BUDGET = large.UNITS * large.UNIT_BYTES // 4
AT_ONCE = 7
"""Copies of a unit: gathered twice, gradients, reduced ones; landed while two units are updated."""
SLACK = 40 * MIB
"""Threads, code that is loaded late, activations."""


def test_host_memory_is_what_the_formula_says() -> None:
    script = str(Path(large.__file__))
    done = subprocess.run(
        [sys.executable, script, str(BUDGET)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["disk"] == 4 * BUDGET
    assert found["lent"] <= BUDGET
    assert found["grown"] < BUDGET + found["ring"] + AT_ONCE * large.UNIT_BYTES + SLACK
    assert found["grown"] < found["disk"]  # what it would hold of weights alone
    assert found["losses"][-1] != found["losses"][0]
    # Forward and backward read each unit, but those still there; an update writes each.
    steps = 3
    assert found["written"] == (steps + 1) * found["disk"]
    assert found["read"] < steps * 2 * found["disk"]
