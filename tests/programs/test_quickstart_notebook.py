"""The notebook: its cells run in order, in an empty folder, and say that the bits are the same."""

import json
import subprocess
import sys
import time
from pathlib import Path

from tree import ROOT

NOTEBOOK = json.loads((ROOT / "examples/quickstart.ipynb").read_text(encoding="utf-8"))


def cells() -> list[str]:
    return ["".join(c["source"]) for c in NOTEBOOK["cells"] if c["cell_type"] == "code"]


def test_it_is_a_notebook_without_output() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in NOTEBOOK["cells"]:
        assert cell.keys() >= {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_its_cells_run_in_order(tmp_path: Path) -> None:
    install, *rest = cells()
    assert install.startswith("%pip install")
    assert not any(line.startswith(("%", "!")) for cell in rest for line in cell.splitlines())
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(rest), encoding="utf-8")
    start = time.monotonic()
    run = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "committed step 10\n" in run.stdout
    assert "resumed at step 10\n" in run.stdout
    assert "bitwise equal to the run in memory: True\n" in run.stdout
    assert "20" in run.stdout.partition("True\n")[2]  # what `inspect` prints: the last commit
    assert time.monotonic() - start < 60
