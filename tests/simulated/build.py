"""Builds the simulated accelerator against the installed torch, when its sources are newer."""

import fcntl
import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType

import torch

NAME = "simulated_native"
_SOURCES = Path(__file__).parent / "csrc"
_BUILDS = Path(__file__).parents[2] / "build" / "simulated"


def load() -> ModuleType:
    """Return the native module, built if need be (one to three minutes, once)."""
    folder = _BUILDS / _digest()
    library = folder / f"{NAME}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "building").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # which ends with its process, however that ends
            if not library.exists():
                _build(folder)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest() -> str:
    """Return what names a build: torch's version and the sources."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build(folder: Path) -> None:
    from torch.utils import cpp_extension  # noqa: PLC0415  # takes a second

    (folder / "lock").unlink(missing_ok=True)  # torch's own, of a build that was killed
    cpp_extension.load(
        NAME,
        [str(path) for path in sorted(_SOURCES.glob("*.cpp"))],
        extra_cflags=["-O1", "-g0", "-DUSE_C10D_GLOO"],
        build_directory=str(folder),
        is_python_module=False,
    )
