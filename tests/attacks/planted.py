"""Pipes, devices and sparse files of a TiB under the names of files that are read.

Run as a program it tries one of ``ATTEMPTS``, or the load of one of ``LOADS``, with each name in
turn, and prints a line of JSON for each: the name, and the error or None. What waits or reads
without end is ended with a traceback.
"""

import contextlib
import faulthandler
import io
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attacks.flips import ENGINE, directories
from doors import DOORS, Door
from machines import PROFILE
from tensorstow import AdamW, save_safetensors, stow
from tensorstow.base.errors import StowError
from tensorstow.cli.main import main
from tensorstow.io.digest_list import SUFFIX
from tensorstow.store.store import Store

SECONDS = 20
"""For one name; each takes a fraction of a second."""
PLANTS = ("pipe", "zeros", "sparse", "grown")
TEBIBYTE = 1 << 40
_WRITTEN_BYTES = 256 << 20
"""More than any attempt writes to one file: a copy of a TiB ends there."""

Attempt = Callable[[Path], object]


def make_plants(folder: Path) -> None:
    """Make one file of each kind, which gets its names as links; a file is grown in place."""
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "zeros").symlink_to("/dev/zero")
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", TEBIBYTE)


def plant(kind: Path, path: Path) -> None:
    """Put a plant in the place of a file, or grow the file itself."""
    if kind.name == "grown":
        path.touch()
        os.truncate(path, TEBIBYTE)
        return
    path.unlink(missing_ok=True)
    os.link(kind, path, follow_symlinks=False)


def optimizer_in(root: Path) -> AdamW:
    """Return an optimizer with states in the directories of a run."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    return AdamW(layer.parameters(), states="disk", dir=directories(root), commit_every=1)


def train(root: Path) -> None:
    """Begin a run and commit two steps."""
    for directory in directories(root):
        directory.mkdir(parents=True)
    optimizer = optimizer_in(root)
    for _ in range(2):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    optimizer.close()


def _command(*words: str) -> Attempt:
    def run(root: Path) -> None:
        first, *others = map(str, directories(root))
        named = [first, *others] if words[0] in {"recover", "clean"} else [first]
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            status = main([*words, *named])
        if status == 2:  # an error of ours, or of the command line
            raise StowError(said.getvalue())

    return run


def _resume(root: Path) -> None:
    optimizer = optimizer_in(root)
    try:
        optimizer.resume()
    finally:
        optimizer.close()


def _open(root: Path) -> None:
    Store.open(directories(root), ENGINE).close()


ATTEMPTS: dict[str, Attempt] = {
    "inspect": _command("inspect"),
    "scrub": _command("scrub"),
    "clean": _command("clean"),
    "recover": _command("recover"),
    "resume": _resume,
    "open": _open,
}


@contextlib.contextmanager
def _weights() -> Iterator[Door]:
    """Stow a model with weights in several files."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def load(folder: Path) -> None:
        fresh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        _, optimizer = stow(fresh, partial(AdamW, lr=0.1), weights=folder)
        optimizer.close()

    yield Door(partial(save_safetensors, model, max_shard_bytes=100), load, list)


@contextlib.contextmanager
def _states() -> Iterator[Door]:
    """Load the states of an optimizer from a file."""
    layer = nn.Linear(4, 4)
    optimizer = AdamW(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()

    def save(folder: Path) -> None:
        folder.mkdir()
        optimizer.save_safetensors(folder / "states.safetensors")

    yield Door(save, lambda at: optimizer.load_safetensors(at / "states.safetensors"), list)
    optimizer.close()


@contextlib.contextmanager
def _planner() -> Iterator[Door]:
    """Plan a model whose configuration is in a folder."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}

    def save(folder: Path) -> None:
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(config))
        (folder / "profile.json").write_text(json.dumps(asdict(PROFILE)))

    def load(folder: Path) -> None:
        words = ("plan", str(folder / "model"), "--profile", str(folder / "profile.json"))
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            status = main([*words, "--host", "8GiB"])
        if status:
            raise StowError(said.getvalue())

    yield Door(save, load, list)


LOADS: dict[str, Callable[[], Any]] = {
    **DOORS,
    "weights": _weights,
    "states": _states,
    "planner": _planner,
}
NEVER_LOADED = "pytorch_model.bin"


def try_loads(plants: Path, folder: Path) -> None:
    """Load with each plant under each name of what was saved, with and without digests."""
    for what, make_door in LOADS.items():
        intact, run = folder / what / "intact", folder / what / "run"
        intact.parent.mkdir(parents=True)
        with make_door() as door:
            door.save(intact)
            door.load(intact)
            files = sorted(p.relative_to(intact) for p in intact.rglob("*") if p.is_file())
            for is_listed in (True, False):
                for file in files:
                    if is_listed or file.suffix != SUFFIX:
                        for kind in PLANTS[:3]:
                            _try(what, door.load, plants / kind, str(file), intact, run)
                for listing in intact.rglob(f"*{SUFFIX}"):
                    listing.unlink()


def try_attempts(plants: Path, intact: Path, run: Path, names: Iterable[str]) -> None:
    """Try all with each plant under each name, each time with fresh files around it."""
    for what, attempt in ATTEMPTS.items():
        for kind in PLANTS:
            for name in names:
                _try(what, attempt, plants / kind, name, intact, run)


def _try(what: str, attempt: Attempt, kind: Path, name: str, intact: Path, run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(intact, run)
    plant(kind, run / name)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_WRITTEN_BYTES, resource.RLIM_INFINITY))
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    error = None
    try:
        attempt(run)
    except StowError as raised:
        error = str(raised)
    faulthandler.cancel_dump_traceback_later()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    sys.stdout.write(f"{json.dumps([what, kind.name, name, error])}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    plants_at, *places = map(Path, sys.argv[1:4])
    if len(places) == 1:
        try_loads(plants_at, *places)
    else:
        try_attempts(plants_at, *places, sys.argv[4:])
