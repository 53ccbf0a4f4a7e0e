"""tools/setup.sh installs the torch that is named: with a pip that notes what it is asked."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tree import ROOT

NOTED = """#!/bin/sh
# Notes what pip is asked for; everything else is Python's.
case "$*" in
  *" install "*) echo "$*" >>asked ;;
  *"pip --disable-pip-version-check --version"*) ;;
  *) exec {python} "$@" ;;
esac
"""


def asked(place: Path, **variables: str) -> list[str]:
    """Return what the step that builds the core asks pip for besides, in a fresh folder."""
    (place / "tools").mkdir()
    (place / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "tools/setup.sh", place / "tools")
    shutil.copy(ROOT / "pyproject.toml", place)
    python = place / ".venv/bin/python"
    python.write_text(NOTED.format(python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TENSORSTOW_")}
    subprocess.run(
        ["/bin/sh", "tools/setup.sh", "native"],
        cwd=place,
        check=True,
        env={**environ, **variables},
        capture_output=True,
        timeout=60,
    )
    lines = (place / "asked").read_text("utf-8").splitlines()
    return [word for line in lines for word in line.split() if word.startswith("torch")]


def test_a_torch_that_is_there_stays(tmp_path: Path) -> None:
    assert asked(tmp_path) == []


def test_another_release_is_installed_if_it_is_named(tmp_path: Path) -> None:
    assert asked(tmp_path, TENSORSTOW_TORCH_VERSION="2.11.0") in (
        ["torch==2.11.0+cpu"],
        ["torch==2.11.0"],  # of a machine with an accelerator
    )


def test_the_release_that_is_named_stays_if_it_is_there(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    release = torch.__version__.split("+")[0]
    assert asked(tmp_path, TENSORSTOW_TORCH_VERSION=release) == []


def test_arguments_for_pip_come_before_a_release(tmp_path: Path) -> None:
    given = {"TENSORSTOW_TORCH": "torch --pre", "TENSORSTOW_TORCH_VERSION": "2.11.0"}
    assert asked(tmp_path, **given) == ["torch"]
