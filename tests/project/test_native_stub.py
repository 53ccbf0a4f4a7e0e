"""One source of truth: the stub is what the built core says of itself."""

import subprocess
import sys
from pathlib import Path

import tensorstow


def test_the_stub_is_generated_from_the_core_as_built(tmp_path: Path) -> None:
    made = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "tensorstow._native"]
    subprocess.run([*command, "-o", str(made)], check=True, capture_output=True)
    kept = Path(tensorstow.__file__).with_name("_native.pyi")
    assert kept.read_text() == made.read_text(), "run `make stub`"
