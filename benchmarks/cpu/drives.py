"""Two drives of which one is twice as fast: bytes on each, and a step against the drives alone.

The drives are folders of one disk. A library that is preloaded (``paced_paths.c``) gives each its
rate, far below the disk's: a transfer takes bytes / rate after the last one of its folder. It also
counts the bytes. The engine's own delays hold for all of its files, so they cannot make one slower
than another. I/O goes through the engine's threads, which is what the library sees.

The ideal is the counted bytes of a step over the rates of the folders in use, together. Each way
runs in a process of its own, and ways take turns. "By rate" has the profile that `tensorstow
calibrate` would write for the two rates; the others have none.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.cpu.models import SMALL, gpt2
from benchmarks.measure import Figure, Limit, Settings, at_most, not_available, run_alone
from tensorstow import AdamW, Plan, stow
from tensorstow.base.profile import (
    ComputeRates,
    DirectoryRates,
    Profile,
    identify_machine,
    write_profile,
)

RATES = (120e6, 60e6)
"""Bytes per second of the two folders."""
_MODULE = "benchmarks.cpu.drives"
_LIBRARY = "paced_paths.so"
_MOST_TURNS, _WARM_UP = 3, 2
_STEPS = 4
"""An even number: the next step begins where the last one ended, so they alternate."""
_MOST_OFF, _MOST_STEP = 0.03, 1.05
_SIZES = {"n_layer": 6, "n_embd": 768, "n_head": 12, "vocab_size": 8000}
_BATCH, _LONG_BATCH = (1, 64), (4, 128)
_ON_DISK = Plan(parameters="disk", states="disk")
_ACTIVATIONS = Plan(activations="disk", activation_ram_budget="64MiB")


@dataclass(frozen=True, slots=True)
class Way:
    """What is on the drives, and how it is shared among them."""

    plan: Plan | None
    """None: ``AdamW`` with states on disk, and nothing but its steps."""
    shares: Literal["by rate", "equal", "alone"]
    batch: tuple[int, int] = _BATCH
    slower: float = 1.0
    """By how much both folders are slower, where a step computes much for its bytes."""

    @property
    def rates(self) -> tuple[float, float]:
        """Return the bytes per second of the folders."""
        return (RATES[0] / self.slower, RATES[1] / self.slower)

    @property
    def is_by_rate(self) -> bool:
        """Return whether bytes and steps are judged."""
        return self.shares == "by rate"


_PLANS = {
    "states": None,
    "everything": _ON_DISK.but(overlap="backward"),
    "everything, in step()": _ON_DISK.but(overlap="none"),
}
WAYS: Mapping[str, Way] = {
    **{f"{name}, by rate": Way(plan, "by rate") for name, plan in _PLANS.items()},
    "activations, by rate": Way(_ACTIVATIONS, "by rate", _LONG_BATCH, slower=4.0),
    "states, equal parts": Way(None, "equal"),
    "everything, equal parts": Way(_PLANS["everything"], "equal"),
    "states, the faster drive alone": Way(None, "alone"),
    "everything, the faster drive alone": Way(_PLANS["everything"], "alone"),
}


def figures(settings: Settings) -> Iterator[Figure]:
    """Run every way in turns; yield its step over the ideal, and how far off the bytes are."""
    for needed, found in (
        ("a C compiler", shutil.which("cc")),
        ("transformers", importlib.util.find_spec("transformers")),
    ):
        if found is None:
            yield not_available("drives", None, f"{needed} is not installed")
            return
    with tempfile.TemporaryDirectory(
        prefix="tensorstow-bench-", dir=settings.scratch(4 << 30)
    ) as path:
        directory = Path(path).resolve()
        _build(directory)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
        for turn in range(1 if settings.quick else min(settings.pairs, _MOST_TURNS)):
            for name in list(WAYS)[:: -1 if turn % 2 else 1]:
                given = _environment(directory, WAYS[name])
                runs[name].append(run_alone(_MODULE, name, path, quick=settings.quick, given=given))
    for name, way in WAYS.items():
        yield _step_figure(name, runs[name], settings.quick or not way.is_by_rate)
    for name, way in WAYS.items():
        if way.is_by_rate:
            yield _bytes_figure(name, runs[name], settings.quick)


def _step_figure(name: str, runs: Sequence[Mapping[str, Any]], only_informs: bool) -> Figure:  # noqa: FBT001
    over = [run["seconds"] / run["ideal"] for run in runs]
    limit: Limit | None = None if only_informs else at_most(_MOST_STEP)
    seconds = statistics.median(run["seconds"] for run in runs)
    note = f"{seconds:.2f} s, {sum(runs[-1]['bytes']) / 1e6:,.0f} MB"
    return Figure(
        f"{name}: step / ideal", limit, statistics.median(over), "x", {"note": note, "runs": runs}
    )


def _bytes_figure(name: str, runs: Sequence[Mapping[str, Any]], only_informs: bool) -> Figure:  # noqa: FBT001
    wanted = RATES[0] / RATES[1]
    ratios = [run["bytes"][0] / max(run["bytes"][1], 1) for run in runs]  # quick: one chunk
    off = [abs(ratio / wanted - 1) for ratio in ratios]
    limit: Limit | None = None if only_informs else at_most(_MOST_OFF)
    detail = {"note": f"{ratios[-1]:.3f} : 1"}
    return Figure(f"{name}: bytes per drive, off the ratio", limit, max(off), "", detail)


def _build(directory: Path) -> None:
    source = Path(__file__).with_name("paced_paths.c")
    options = ["-O2", "-shared", "-fPIC", "-o", directory / _LIBRARY]
    compiler = shutil.which("cc") or "cc"
    subprocess.run([compiler, *options, source, "-ldl", "-lpthread"], check=True)


def _environment(directory: Path, way: Way) -> dict[str, str]:
    """Return what the child needs to be paced, and a cache of profiles of its own."""
    paces = zip(_folders(directory), way.rates, strict=True)
    return {
        "LD_PRELOAD": str(directory / _LIBRARY),
        "PACED_PATHS": ":".join(f"{path}={rate}" for path, rate in paces),
        "TENSORSTOW_IO": "threads",
        "XDG_CACHE_HOME": str(directory / f"cache {way.shares}"),
    }


def _folders(directory: Path) -> list[Path]:
    folders = [directory / "fast", directory / "slow"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return folders


# --- the child ---


def _measure(way: Way, directory: Path, *, quick: bool) -> dict[str, Any]:
    folders = _folders(directory)
    if way.is_by_rate:
        write_profile(_profile_of(folders))
    used = folders[:1] if way.shares == "alone" else folders
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = gpt2(**SMALL if quick else _SIZES, **ends)
    make = partial(AdamW, lr=1e-4, durability="none")
    ids = torch.randint(model.config.vocab_size, (2, 16) if quick else way.batch)
    if way.plan is None:
        optimizer = make(model.parameters(), states="disk", dir=used)
    else:
        plan = way.plan
        if quick and plan == _ACTIVATIONS:
            plan = plan.but(activation_ram_budget=0)
        model, optimizer = stow(model, make, plan=plan, dir=used)

    def step() -> None:
        if way.plan is not None or not any(p.grad is not None for p in model.parameters()):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        if way.plan is not None:
            optimizer.zero_grad()

    for _ in range(_WARM_UP):  # the first one reads no states: there are none
        step()
    before, start = _counted(), time.perf_counter()
    for _ in range(_STEPS):
        step()
    seconds = (time.perf_counter() - start) / _STEPS
    moved = [(b - a) / _STEPS for a, b in zip(before, _counted(), strict=True)]
    optimizer.close()
    return {"seconds": seconds, "ideal": sum(moved) / sum(way.rates[: len(used)]), "bytes": moved}


def _counted() -> list[int]:
    """Return the bytes that were read and written in each folder."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.paced_bytes.restype = ctypes.c_longlong
    return [sum(library.paced_bytes(n, operation) for operation in (0, 1)) for n in (0, 1)]


def _profile_of(folders: Sequence[Path]) -> Profile:
    """Return a profile that has the rates of the folders; nothing else of it is used."""
    rates = [
        DirectoryRates(read=rate, write=rate, mixed=rate, block_bytes=1 << 20, depth=32)
        for rate in RATES
    ]
    return Profile(
        machine=identify_machine(),
        memory_read=1e10,
        memory_write=1e10,
        memory_copy=1e10,
        checksums=1e10,
        compute={"cpu": ComputeRates({"float32": 1e11}, 1e10, 1e-5, 1e9)},
        directories=dict(zip(map(str, folders), rates, strict=True)),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=WAYS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    print(json.dumps(_measure(WAYS[options.name], options.directory, quick=options.quick)))
