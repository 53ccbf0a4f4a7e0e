"""GPT-2 on the CPU in each placement, each run in a process of its own, with and without clipping.

Every process has the allocator's defaults, as a user's has, and all cores. Runs of all placements
take turns. Time, page faults and seconds of the cores are per step; memory is the peak of resident
bytes. Steps are compared with torch's fused AdamW, everything in RAM, with the same clipping.

Some more steps of each run of ours are recorded. The parts of a step come from that log; their
seconds sum to an average step of these.
"""

import argparse
import importlib.util
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.models import SMALL, gpt2
from benchmarks.measure import Figure, Limit, Sample, Settings, at_most, not_available, run_ways
from tensorstow import AdamW, Plan, stow

COMMAND = "python benchmarks/run.py placements"
_TORCH = "torch fused, in RAM"
_IN_RAM, _ON_DISK = Plan(), Plan(parameters="disk", states="disk")
_STATES = Plan(states="disk", overlap="none")
_BUDGET = "448MiB"
PLACEMENTS: Mapping[str, tuple[Plan | None, bool, float | None]] = {
    _TORCH: (None, False, None),
    "states in RAM": (_IN_RAM, False, 1.00),
    "states on disk": (_STATES, False, 1.05),
    "states on disk, beside backward": (_STATES.but(overlap="backward"), False, 1.03),
    f"states on disk, beside backward, {_BUDGET}": (
        _STATES.but(overlap="backward", ram_budget=_BUDGET),
        False,
        1.01,
    ),
    "states on disk, beside forward": (_STATES.but(overlap="forward"), False, 1.03),
    "everything on disk, in step()": (_ON_DISK.but(overlap="none"), False, None),
    "everything on disk": (_ON_DISK, False, None),
    "everything on disk, beside backward": (_ON_DISK.but(overlap="backward"), False, 1.10),
    f"{_TORCH}, clipped": (None, True, None),
    "everything on disk, in step(), clipped": (_ON_DISK.but(overlap="none"), True, None),
    "everything on disk, clipped": (_ON_DISK, True, 1.10),
}
"""Plan (None: torch's optimizer), clipping, and the most that a step is to take of torch's."""
_MOST_TURNS, _STEPS, _RECORDED = 5, 6, 4
_CLIP = 1.0
_BATCH, _SMALL_BATCH = (4, 128), (2, 16)


def figures(settings: Settings) -> Iterator[Figure]:
    """Run every placement in turns; yield its step as a multiple of torch's, and what it took."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("placements", None, "transformers is not installed")
        return
    directory = settings.scratch(4 << 30)
    clipped = [f"{_TORCH}, clipped", "everything on disk, clipped"]
    names = clipped if settings.quick else list(PLACEMENTS)
    turns = min(settings.pairs, _MOST_TURNS)
    runs = run_ways("benchmarks.cpu.placements", names, turns, directory, quick=settings.quick)
    for name in names:
        _, clips, asked = PLACEMENTS[name]
        base = f"{_TORCH}, clipped" if clips else _TORCH
        limit = None if asked is None or settings.quick else at_most(asked)
        yield _figure(name, runs[name], runs[base], limit)


def _figure(
    name: str, of_name: list[dict[str, Any]], of_base: list[dict[str, Any]], limit: Limit | None
) -> Figure:
    ours, base = (Sample(tuple(run["seconds"] for run in runs)) for runs in (of_name, of_base))
    medians = {
        key: statistics.median(run[key] for run in of_name)
        for key in ("rss_mib", "faults", "user", "system")
    }
    detail = {"command": COMMAND, "seconds": ours.summary(), **medians}
    detail["note"] = (
        f"{ours.median:.2f} s, {medians['rss_mib']:,.0f} MiB, {medians['faults']:,.0f} faults,"
        f" {medians['user']:.2f} s user, {medians['system']:.2f} s system"
    )
    in_order = sorted(of_name, key=lambda run: run["seconds"])
    detail["parts"] = parts = in_order[len(in_order) // 2]["parts"]
    if parts:
        seconds = ", ".join(f"{part['name']} {part['seconds']:.2f}" for part in parts)
        beside = sum(p["beside_updates"] for p in parts if not p["name"].startswith("waiting"))
        detail["note"] += f". A recorded step: {seconds}; {beside:.2f} s of updates hidden"
    return Figure(f"{name}: step / torch fused", limit, ours.median / base.median, "x", detail)


# --- the child ---


def _measure(name: str, directory: Path, *, quick: bool) -> dict[str, Any]:
    plan, clips, _ = PLACEMENTS[name]
    model = gpt2(**SMALL if quick else {})
    words = model.config.vocab_size
    if plan is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        scratch = {"dir": directory, "durability": "none"} if plan != _IN_RAM else {}
        model, optimizer = stow(model, partial(AdamW, lr=1e-4, **scratch), plan=plan)
    ids = torch.randint(words, _SMALL_BATCH if quick else _BATCH)

    def train() -> float:
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    for _ in range(2):  # the first ones allocate, and read states that were never written
        train()
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = [train() for _ in range(_STEPS)]
    after = resource.getrusage(resource.RUSAGE_SELF)
    parts: list[dict[str, Any]] = []
    if plan is not None:
        with optimizer.recording():
            for _ in range(_RECORDED):
                train()
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            files = optimizer.report(folder)
            parts = json.loads(files["figures"].read_text(encoding="utf-8"))["parts"]
        optimizer.close()
    return {
        "seconds": statistics.median(seconds),
        "parts": parts,
        "rss_mib": after.ru_maxrss / 1024,
        "faults": (after.ru_minflt - before.ru_minflt) / _STEPS,
        "user": (after.ru_utime - before.ru_utime) / _STEPS,
        "system": (after.ru_stime - before.ru_stime) / _STEPS,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=PLACEMENTS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    print(json.dumps(_measure(options.name, options.directory, quick=options.quick)))
