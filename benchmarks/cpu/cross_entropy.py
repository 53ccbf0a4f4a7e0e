"""The chunked cross entropy against torch's, forward and backward, each in a fresh process.

4,096 tokens of width 512 (which two cores multiply in seconds) and 131,072 classes. How memory is
measured: the peak of VmRSS over a pass, less VmRSS before it. Hidden states, weight and labels are
there before; logits, their gradients, and the gradients of hidden states and weight are counted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.measure import (
    Figure,
    Limit,
    Sample,
    Settings,
    at_most,
    in_turns,
    ratio,
    run_alone,
    use_all_cores,
)
from tensorstow.losses import chunked_cross_entropy
from tensorstow.report.rss import peak_bytes, resident_bytes, return_freed_memory

_TOKENS, _WIDTH, _CLASSES = 4096, 512, 131072
_QUICK = (256, 32, 8192)
_WAYS = ("ours", "torch")
_MIB = 1 << 20


def figures(settings: Settings) -> Iterator[Figure]:
    """Run both ways in turns, in fp32 and then in bfloat16."""
    for dtype, most_time, most_memory in (
        ("float32", at_most(1.10), at_most(1 / 8)),
        ("bfloat16", None, None),
    ):
        run = partial(run_alone, "benchmarks.cpu.cross_entropy", dtype, quick=settings.quick)
        turns = settings.pairs if dtype == "float32" else min(settings.pairs, 3)
        runs = in_turns(_WAYS, turns, run)
        yield from _compared(dtype, runs, most_time, most_memory)


def _compared(
    dtype: str,
    runs: dict[str, list[dict[str, Any]]],
    most_time: Limit | None,
    most_memory: Limit | None,
) -> Iterator[Figure]:
    peaks = {way: statistics.median(run["bytes"] for run in runs[way]) for way in _WAYS}
    yield Figure(
        f"chunked cross entropy, {dtype}: peak memory / torch's",
        most_memory,
        peaks["ours"] / peaks["torch"],
        detail={"mib": {way: round(nbytes / _MIB) for way, nbytes in peaks.items()}},
    )
    samples = {way: Sample(tuple(run["seconds"] for run in runs[way])) for way in _WAYS}
    name = f"chunked cross entropy, {dtype}: time / torch's"
    yield ratio(name, most_time, samples, "ours", "torch")


# --- the child ---


def _measure(way: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> dict[str, float]:
    tokens, width, classes = sizes
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(classes, width, generator=generator).mul_(0.02).to(dtype).requires_grad_()
    labels = torch.randint(classes, (tokens,), generator=generator)

    def run(rows: int) -> None:
        if way == "ours":
            loss = chunked_cross_entropy(hidden[:rows], weight, labels[:rows])
        else:
            loss = functional.cross_entropy(hidden[:rows] @ weight.T, labels[:rows])
        loss.backward()
        hidden.grad = weight.grad = None

    run(1)  # threads, and memory of libraries
    return_freed_memory()
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that of now
    start = time.perf_counter()
    run(tokens)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": (peak_bytes() or 0) - before}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype")
    parser.add_argument("way", choices=_WAYS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    use_all_cores()
    sizes = _QUICK if options.quick else (_TOKENS, _WIDTH, _CLASSES)
    print(json.dumps(_measure(options.way, getattr(torch, options.dtype), sizes)))
