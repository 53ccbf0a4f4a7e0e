"""A step that keeps averages of the weights, and the same beside torch's AveragedModel.

Each way is a process of its own, in turns: AdamW alone, AdamW with ``ema=``, and AdamW followed by
``AveragedModel.update_parameters()``, states in memory and on disk. A step is an update of 134
million fp32 parameters with the same gradients.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.measure import (
    Figure,
    Sample,
    Settings,
    as_child,
    digest_of,
    exactly,
    ratio,
    run_ways,
)
from tensorstow import AdamW
from tensorstow.report.rss import peak_bytes

_ALONE, _OURS, _TORCH = "alone", "ema", "AveragedModel"
_TIERS = ("host", "disk")
_WAYS = [f"{tier} {way}" for tier in _TIERS for way in (_ALONE, _OURS, _TORCH)]
_WIDTH, _LAYERS = 4096, 8
_STEPS = 7
_MOST_TURNS = 5
_DECAY = 0.999


def figures(settings: Settings) -> Iterator[Figure]:
    """Run all ways in turns; yield what averages cost, and that both have the same bits."""
    directory, turns = settings.scratch(4 << 30), min(settings.pairs, _MOST_TURNS)
    runs = run_ways("benchmarks.cpu.averages", _WAYS, turns, directory, quick=settings.quick)
    samples = {
        name: Sample(tuple(run["seconds"] for run in of_name)) for name, of_name in runs.items()
    }
    for tier in _TIERS:
        alone, ours, torchs = (f"{tier} {way}" for way in (_ALONE, _OURS, _TORCH))
        what = f"a step with averages, states on {tier.upper()}"
        yield ratio(f"{what}: time / without", None, samples, ours, alone)
        yield ratio(f"{what}: time / with AveragedModel", None, samples, ours, torchs)
        digests = {run["digest"] for name in (ours, torchs) for run in runs[name]}
        yield Figure(f"{what}: different averages", exactly(1), len(digests), "")
        peaks = {
            way: statistics.median(run["peak_bytes"] for run in runs[f"{tier} {way}"])
            for way in (_ALONE, _OURS, _TORCH)
        }
        more = (peaks[_OURS] - peaks[_ALONE]) / (peaks[_TORCH] - peaks[_ALONE])
        name = f"{what}: more resident memory / AveragedModel's"
        yield Figure(name, None, more, detail={"peak_bytes": peaks})


# --- the child ---


def _measure(name: str, directory: Path, *, quick: bool) -> dict[str, Any]:
    tier, way = name.split()
    width = 64 if quick else _WIDTH
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))
    place: dict[str, Any] = {"states": "host"}
    if tier == "disk":
        place = {"states": "disk", "dir": directory, "durability": "none"}
    ema = _DECAY if way == _OURS else None
    optimizer = AdamW(model.parameters(), lr=1e-3, module=model, ema=ema, **place)
    beside = None
    if way == _TORCH:
        beside = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(_DECAY))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    seconds = []
    for _ in range(2 + _STEPS):
        start = time.perf_counter()
        optimizer.step()
        if beside is not None:
            beside.update_parameters(model)
        seconds.append(time.perf_counter() - start)
    peak = peak_bytes()
    digest = 0
    if beside is not None:
        digest = digest_of(beside.module.parameters())
    elif ema is not None:
        with optimizer.averaged(model):
            digest = digest_of(model.parameters())
    optimizer.close()
    return {
        "seconds": statistics.median(seconds[2:]),
        "peak_bytes": peak,
        "digest": digest,
    }


if __name__ == "__main__":
    as_child(_measure, _WAYS)
