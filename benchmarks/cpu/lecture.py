"""A lecture's comparison, on the CPU: no offload, naive offloading, ZeRO-Offload and ZeRO-Infinity.

Each way trains the seed example's GPT-2 in a fresh process. Without an accelerator, host memory
stands for the fast tier and the disk for the slow one. Memory is the peak of VmRSS over the steps
that count, less VmRSS before the model is made. Disk is what the files of the process occupy.
"""

import gc
import importlib
import importlib.util
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.models import SMALL
from benchmarks.cpu.seed_example import scratch_files
from benchmarks.measure import Figure, Sample, Settings, as_child, exactly, not_available, run_ways
from tensorstow import AdamW, PipelinePolicy, Plan, stow
from tensorstow.report.rss import peak_bytes, resident_bytes, return_freed_memory

COMMAND = "python benchmarks/run.py lecture"
WAYS: Mapping[str, tuple[Plan, PipelinePolicy]] = {
    "no offload": (Plan(), PipelinePolicy()),
    "naive offloading": (Plan(states="disk", overlap="none"), PipelinePolicy(schedule="naive")),
    "ZeRO-Offload": (Plan(states="disk", overlap="backward"), PipelinePolicy()),
    "ZeRO-Infinity": (
        Plan(parameters="disk", states="disk", overlap="backward"),
        PipelinePolicy(),
    ),
}
_MOST_PAIRS = 5
_STEPS = 4
_MIB = 1 << 20
_BATCH, _SMALL_BATCH = (4, 128), (2, 16)


def figures(settings: Settings) -> Iterator[Figure]:
    """Run every way in turns; yield seconds of a step and bytes of each tier."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("the lecture's comparison", None, "transformers is not installed")
        return
    directory = settings.scratch(4 << 30)
    turns = min(settings.pairs, _MOST_PAIRS)
    runs = run_ways("benchmarks.cpu.lecture", WAYS, turns, directory, quick=settings.quick)
    yield from judge(runs)


def judge(runs: Mapping[str, list[dict[str, Any]]]) -> Iterator[Figure]:
    """Yield the figures of runs, by way: one for each tier and for the step."""
    for way, of_way in runs.items():
        sample = Sample(tuple(run["seconds"] for run in of_way))
        detail = {"command": COMMAND, "seconds": sample.summary()}
        yield Figure(f"{way}: seconds of a step", None, sample.median, "s", detail)
        for tier in ("memory", "disk"):
            nbytes = statistics.median(run[tier] for run in of_way)
            yield Figure(f"{way}: peak bytes, {tier}", None, nbytes / _MIB, "MiB")
    losses = {tuple(run["losses"]) for of_way in runs.values() for run in of_way}
    yield Figure("the lecture's comparison: different loss curves", exactly(1), len(losses), "")


# --- the child ---


def _measure(way: str, directory: Path, *, quick: bool) -> dict[str, Any]:
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(**SMALL if quick else {})
    shape = _SMALL_BATCH if quick else _BATCH
    plan, policy = WAYS[way]
    gc.collect()
    return_freed_memory()
    before = resident_bytes()
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    scratch = {} if plan == Plan() else {"dir": directory, "durability": "none"}
    make = partial(AdamW, lr=1e-4, policy=policy, **scratch)
    model, optimizer = stow(model, make, plan=plan)
    batches = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for step in range(_STEPS):
        if step == 1:  # the first allocates, and reads states that were never written
            optimizer.synchronize()
            gc.collect()
            return_freed_memory()
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # a new peak
        ids = torch.randint(config.vocab_size, shape, generator=batches)
        torch.manual_seed(step)  # dropout
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        del loss
    memory = (peak_bytes() or 0) - before
    optimizer.synchronize()
    disk = sum(os.fstat(file).st_blocks * 512 for file in scratch_files())
    optimizer.close()
    found = {"memory": memory, "disk": disk, "losses": losses}
    return found | {"seconds": statistics.median(seconds[1:])}


if __name__ == "__main__":
    as_child(_measure, WAYS)
