"""Saved activations of the seed example's GPT-2 at 4 x 1024, on the CPU: four ways to keep them.

Each way trains in a fresh process: one step to warm up, then one that counts. How memory is
measured: the peak of VmRSS over a step, less VmRSS before it, where gradients and optimizer states
are there already. So what is counted is activations, and what the loss and single operations hold.
"""

import gc
import importlib.util
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import tensorstow
from benchmarks.cpu.models import SMALL, gpt2
from benchmarks.measure import (
    Figure,
    Sample,
    Settings,
    as_child,
    at_least,
    at_most,
    not_available,
    ratio,
    run_ways,
)
from tensorstow.activations.offload import ActivationOffload, offload_activations
from tensorstow.optim.adam import AdamW
from tensorstow.report.rss import peak_bytes, resident_bytes, return_freed_memory

_BATCH, _SMALL_BATCH = (4, 1024), (4, 64)
_SMALL = {**SMALL, "n_layer": 4}
_BUDGET, _SMALL_BUDGET = 128 << 20, 1 << 20
_WAYS = ("kept", "disk", "disk, loss too", "save_on_cpu", "recomputed")
_MOST_PAIRS = 5
"""A step takes half a minute."""
_MIB = 1 << 20


def figures(settings: Settings) -> Iterator[Figure]:
    """Run every way in turns; then compare their steps and peaks."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("activations", None, "transformers is not installed")
        return
    directory = settings.scratch(8 << 30)
    turns = min(settings.pairs, _MOST_PAIRS)
    runs = run_ways("benchmarks.cpu.activations", _WAYS, turns, directory, quick=settings.quick)
    samples = {way: Sample(tuple(run["seconds"] for run in runs[way])) for way in _WAYS}
    peaks = {way: statistics.median(run["bytes"] for run in runs[way]) for way in _WAYS}
    for way in _WAYS[1:]:
        limit = at_most(1.10) if way == "disk" else None
        yield ratio(f"GPT-2, 4 x 1024, step: activations {way} / kept", limit, samples, way, "kept")
    for way in _WAYS[1:]:
        yield Figure(
            f"GPT-2, 4 x 1024, peak memory of a step: activations {way} / kept",
            None,
            peaks[way] / peaks["kept"],
            detail={"mib": {name: round(nbytes / _MIB) for name, nbytes in peaks.items()}},
        )
    moved = statistics.median(run["moved"] for run in runs["disk"])
    yield Figure(
        "GPT-2, 4 x 1024, activations of the blocks on disk: memory saved / bytes moved",
        at_least(0.85),
        (peaks["kept"] - peaks["disk"]) / moved,
        detail={"moved_mib": round(moved / _MIB), "ram_budget_mib": _BUDGET // _MIB},
    )
    losses = {run["loss"] for way in _WAYS for run in runs[way]}
    name = "GPT-2, 4 x 1024: losses of all ways that differ"
    yield Figure(name, at_most(0), len(losses) - 1, "")


# --- the child ---


def _measure(way: str, directory: Path, *, quick: bool) -> dict[str, float]:
    model = gpt2(**_SMALL if quick else {})
    ids = torch.randint(512, _SMALL_BATCH if quick else _BATCH, generator=torch.Generator())
    optimizer = AdamW(model.parameters(), lr=1e-5)
    offload, around = _place(way, model, directory, _SMALL_BUDGET if quick else _BUDGET)

    def step() -> float:
        torch.manual_seed(0)
        with around:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients stay, and are not counted
        return float(loss.item())

    step()
    gc.collect()
    return_freed_memory()
    moved = tensorstow.usage(model).activations.bytes_written if offload else 0
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that of now
    start = time.perf_counter()
    loss = step()
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "bytes": (peak_bytes() or 0) - before, "loss": loss}
    found["moved"] = tensorstow.usage(model).activations.bytes_written - moved if offload else 0
    if offload:
        offload.close()
    optimizer.close()
    return found


def _place(
    way: str, model: nn.Module, directory: Path, budget: int
) -> tuple[ActivationOffload | None, AbstractContextManager[object]]:
    """Have the model's activations go where ``way`` says; the context is for its forward."""
    if way.startswith("disk"):
        units = None if way == "disk, loss too" else list(model.transformer.h)
        made = offload_activations(model, to="disk", ram_budget=budget, dir=directory, units=units)
        return made, nullcontext()
    if way == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return None, save_on_cpu() if way == "save_on_cpu" else nullcontext()


if __name__ == "__main__":
    as_child(_measure, _WAYS)
