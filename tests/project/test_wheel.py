"""The wheel alone: what it declares is all that it imports."""

import re
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

from tree import ROOT

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path[:0] = sys.argv[1:]
import tensorstow
names = [m.name for m in pkgutil.walk_packages(tensorstow.__path__, "tensorstow.")]
for name in names:
    # What the demonstration trains is the extra [demo], and Triton is the extra [kernel]; nothing
    # else of the package imports these modules where the extra is not installed.
    if not name.startswith(("tensorstow.cli.demo.", "tensorstow.step.fused_kernel")):
        importlib.import_module(name)
from tensorstow import *
print(len(names), tensorstow.__file__)
"""


def built_in(folder: Path) -> Path:
    """Build the wheel, over what is compiled already; return it unpacked."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), "."]
    subprocess.run(command, cwd=ROOT, check=True, timeout=110)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "installed")
    return folder / "installed"


def declared_by(installed: Path) -> dict[str, Distribution]:
    """Return the distributions that an installer would bring, no extras, by their names."""
    (info,) = installed.glob("*.dist-info")
    found: dict[str, Distribution] = {}
    waiting = list(Distribution.at(info).requires or ())
    while waiting:
        requirement = waiting.pop()
        name, _, condition = requirement.partition(";")
        name = re.split(r"[^\w.-]", name.strip(), maxsplit=1)[0].lower()
        # Of the other conditions (platforms, versions) some do not hold: those are not installed.
        if "extra ==" in condition or name in found:
            continue
        try:
            found[name] = distribution(name)
        except ModuleNotFoundError:
            assert condition, f"{name} is required and not installed"
            continue
        waiting += found[name].requires or ()
    return found


def linked(distributions: dict[str, Distribution], folder: Path) -> Path:
    """Return a folder in which these distributions, and no others, can be imported."""
    folder.mkdir()
    for one in distributions.values():
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            place = folder / top
            if not place.exists() and not top.endswith(".pth"):
                place.symlink_to(one.locate_file(top))
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_in(tmp_path_factory.mktemp("wheel"))


def test_every_module_imports_with_what_the_wheel_declares(wheel: Path, tmp_path: Path) -> None:
    declared = linked(declared_by(wheel), tmp_path / "declared")
    assert {"torch", "safetensors"} <= {path.name for path in declared.iterdir()}
    # -S: nothing of this environment is seen; -I: nor of its variables.
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(wheel), str(declared)]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    number, place = done.stdout.split()
    assert int(number) > 100
    assert Path(place).is_relative_to(wheel)
