"""The wheel alone: what it declares is all that it imports, and it needs no compiler."""

import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

from tree import ROOT

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path[:0] = sys.argv[1:]
import tensorstow
assert "torch" not in sys.modules  # which takes a second: names are imported on first use
tensorstow.AdamW
assert not {"torch.distributed.fsdp", "torch.distributed.tensor"} & sys.modules.keys()
names = [m.name for m in pkgutil.walk_packages(tensorstow.__path__, "tensorstow.")]
for name in names:
    # Triton is the extra [kernel], and a program that imports an integration has its trainer;
    # nothing else of the package imports these modules.
    if not name.startswith(("tensorstow.step.fused_kernel", "tensorstow.integrations.")):
        importlib.import_module(name)
from tensorstow import *
print(len(names), tensorstow.__file__)
"""

TRAIN = """
import torch, tensorstow
weights = [torch.nn.Parameter(torch.ones(1000)) for _ in range(2)]
optimizers = [
    tensorstow.AdamW(weights[:1], lr=0.1, states="disk", dir="run"),
    torch.optim.AdamW(weights[1:], lr=0.1),
]
for weight, optimizer in zip(weights, optimizers):
    for _ in range(3):
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print(torch.allclose(*weights, rtol=1e-6))
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


@pytest.fixture(scope="module")
def declared(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = linked(declared_by(wheel), tmp_path_factory.mktemp("linked") / "declared")
    assert {"torch", "safetensors"} <= {path.name for path in folder.iterdir()}
    return folder


def test_it_trains_in_an_environment_without_a_compiler(
    wheel: Path, declared: Path, tmp_path: Path
) -> None:
    fresh = tmp_path / "fresh"
    venv.create(fresh)
    packages = fresh / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (packages / "declared.pth").write_text(f"{declared}\n")
    (file,) = wheel.parent.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(fresh)]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", str(file)], check=True, timeout=60
    )
    subprocess.run([*pip, "check"], check=True, timeout=60)
    environment = {"PATH": str(fresh / "bin"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for command in (["tensorstow", "doctor", "--directory", "."], ["python", "-c", TRAIN]):
        done = subprocess.run(
            [fresh / "bin" / command[0], *command[1:]],
            check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_every_module_imports_with_what_the_wheel_declares(
    wheel: Path, declared: Path, tmp_path: Path
) -> None:
    # -S: nothing of this environment is seen; -I: nor of its variables.
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(wheel), str(declared)]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    number, place = done.stdout.split()
    assert int(number) > 100
    assert Path(place).is_relative_to(wheel)
