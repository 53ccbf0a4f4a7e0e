"""The seed example (GPT-2 on the CPU, 3 steps) with and without offload, in fresh processes.

How memory is measured: at the end of the last step, gradients set to None and outputs deleted,
`malloc_trim(0)` gives free heap back to the system, then VmRSS is read. What is left is weights,
states, buffers and libraries; the C library's caches would otherwise be most of the noise. Pages
of the scratch files are counted by mincore() over a mapping of each unlinked file.
"""

import argparse
import ctypes
import gc
import importlib.util
import itertools
import json
import mmap
import os
import stat
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.models import SMALL, gpt2
from benchmarks.measure import (
    Figure,
    Sample,
    Settings,
    at_least,
    at_most,
    exactly,
    not_available,
    ratio,
    run_alone,
    use_all_cores,
)
from tensorstow import usage
from tensorstow.optim.adam import AdamW
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.report.rss import resident_bytes, return_freed_memory
from tensorstow.states.layout import Family
from tensorstow.states.memory import predict_memory
from tensorstow.states.policy import PipelinePolicy

_STEPS = 3
_BATCH = (4, 128)
_STATE_BYTES = 8  # per fp32 parameter under Adam
_MEMORY_RUNS = 3
_LARGEST_RING = 48 << 20
_LARGE_BUDGET = 192 << 20
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run the example; the child's command line."""

    name: str
    fraction: float | None = None
    """States on disk; None: torch's fused AdamW."""
    budget: int | None = None

    def arguments(self) -> list[str]:
        """Return what the child parses."""
        given = {"fraction": self.fraction, "budget": self.budget}
        return [f"--{key}={value}" for key, value in given.items() if value is not None]


_TORCH = Row("torch fused")
_RAM = Row("fraction 0.0", 0.0)
_HALF = Row("fraction 0.5", 0.5)
_DISK = Row("fraction 1.0", 1.0)
_BUDGET = Row(f"fraction 1.0, budget {_LARGE_BUDGET // _MIB} MiB", 1.0, _LARGE_BUDGET)

Runs = Mapping[str, Sequence[dict[str, Any]]]


def figures(settings: Settings) -> Iterator[Figure]:
    """Run every row in fresh processes, in turns, and compare."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("the seed example", None, "transformers is not installed")
        return
    runs = _run_all(settings)
    yield from _times(runs)
    yield from _memory(runs)
    yield from _read_ahead(runs)


def _run_all(settings: Settings) -> Runs:
    runs: dict[str, list[dict[str, Any]]] = {}
    for turn in range(settings.pairs):
        rows = [_TORCH, _RAM, _DISK]
        if turn < _MEMORY_RUNS:
            rows += [_HALF, _BUDGET]
        for row in rows:
            runs.setdefault(row.name, []).append(_run(row, settings))
    return runs


def _run(row: Row, settings: Settings) -> dict[str, Any]:
    directory = settings.scratch(2 << 30)
    arguments = [f"--directory={directory}", *row.arguments()]
    return run_alone("benchmarks.cpu.seed_example", *arguments, quick=settings.quick)


# --- what the rows say ---


def _times(runs: Runs) -> Iterator[Figure]:
    for quantity, what in (
        ("total_seconds", "3 steps, the first counted"),
        ("steady_step_seconds", "steady step"),
        ("steady_optimizer_seconds", "steady opt.step"),
    ):
        samples = {
            row.name: Sample(tuple(run[quantity] for run in runs[row.name]))
            for row in (_TORCH, _RAM, _DISK)
        }
        for row, base in ((_RAM, _TORCH), (_DISK, _RAM), (_DISK, _TORCH)):
            title = f"seed example, {what}: {row.name} / {base.name}"
            yield ratio(title, None, samples, row.name, base.name)
    losses = {tuple(run["losses"]) for name in runs if name != _TORCH.name for run in runs[name]}
    yield Figure("seed example: different loss curves among our rows", exactly(1), len(losses), "")


def _memory(runs: Runs) -> Iterator[Figure]:
    ram, half, disk = (runs[row.name][0] for row in (_RAM, _HALF, _DISK))
    states = _STATE_BYTES * ram["parameters"]
    ring = disk["memory"]["ring_bytes"]
    saved = ram["memory"]["host_bytes"] - disk["memory"]["host_bytes"] + ring
    title = "seed example: state bytes that left RAM / (8 x parameters)"
    yield Figure(f"{title}, fraction 1.0", exactly(1.0), saved / states, detail=disk["memory"])
    gone = ram["memory"]["ram_bytes"] - half["memory"]["ram_bytes"]
    yield Figure(f"{title}, fraction 0.5", exactly(0.5), gone / states, detail=half["memory"])

    rss = {row.name: [run["rss_bytes"] for run in runs[row.name]] for row in (_RAM, _HALF, _DISK)}
    medians = {name: statistics.median(values) for name, values in rss.items()}
    for row, share in ((_DISK, 1.0), (_HALF, 0.5)):
        lower = medians[_RAM.name] - medians[row.name]
        yield Figure(
            f"seed example: RSS lower / (states on disk less the ring), {row.name}",
            at_least(0.88),
            lower / (share * states - ring),
            detail={
                "rss_bytes": rss,
                "lower_by_mb": lower / 1e6,
                "ring_bytes": ring,
                "how": __doc__,
            },
        )
    cached = max(run["page_cache_bytes"] for row in (_HALF, _DISK) for run in runs[row.name])
    size = disk["file_bytes"]
    yield Figure(
        "seed example: scratch files in the page cache",
        at_most(1.0),
        cached / _MIB,
        "MiB",
        {"file_bytes": size, "note": f"of {size / _MIB:.0f} MiB"},
    )
    yield Figure("ring by default", at_most(_LARGEST_RING / _MIB), ring / _MIB, "MiB")
    yield Figure(
        "ring for a model ten times larger / this one", exactly(1.0), _ten_times(disk) / ring
    )


def _ten_times(disk: dict[str, Any]) -> int:
    """Return the ring's bytes for ten models like this one."""
    plan = predict_memory(
        [(Family(torch.float32, amsgrad=False), disk["sizes"] * 10)],
        chunk_elements=PipelinePolicy().chunk,
    )
    return plan.ring_bytes


def _read_ahead(runs: Runs) -> Iterator[Figure]:
    """Judge what a larger budget buys: states that stay in RAM, beside the ring."""
    usual, larger = (runs[row.name][0] for row in (_DISK, _BUDGET))
    memory = larger["memory"]
    title = f"ram_budget {_LARGE_BUDGET // _MIB} MiB"
    yield Figure(
        f"{title}: ring and states that stay in RAM",
        at_most(_LARGE_BUDGET / _MIB),
        memory["host_bytes"] / _MIB,
        "MiB",
        detail=memory,
    )
    room = min(_LARGE_BUDGET - memory["ring_bytes"], memory["logical_bytes"])
    yield Figure(
        f"{title}: states that stay in RAM / what the ring leaves of the budget",
        at_least(0.9),
        memory["ram_bytes"] / room,
    )
    moved, least = (
        run["traffic"]["bytes_written"] / run["memory"]["logical_bytes"] for run in (usual, larger)
    )
    yield Figure(
        f"{title}: bytes written, with the budget / by default",
        at_most((1 - memory["ram_bytes"] / memory["logical_bytes"]) * 1.01),
        least / moved,
        detail={
            row.name: {
                "traffic": runs[row.name][0]["traffic"],
                "read_ahead_bytes": runs[row.name][0]["read_ahead_bytes"],
            }
            for row in (_DISK, _BUDGET)
        },
    )
    for row in (_DISK, _BUDGET):
        seconds = statistics.median(run["steady_optimizer_seconds"] for run in runs[row.name])
        yield Figure(f"seed example, steady opt.step: {row.name}", None, seconds, "s")


# --- the child ---


def main() -> None:
    """Run one row; print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fraction", type=float)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    use_all_cores()
    model, batches = _example(quick=options.quick)
    parameters = list(model.parameters())
    optimizer = _optimizer(parameters, options)
    if isinstance(optimizer, StowedAdam):
        optimizer.start_trace()
    result = _train(model, optimizer, batches)
    if isinstance(optimizer, StowedAdam):
        read_ahead = [
            e.nbytes
            for e in optimizer.trace()
            if e.lane == "read" and result["last_backward"] < e.start < result["last_step"]
        ]
        optimizer.synchronize()
        memory = usage(optimizer=optimizer).states
        result |= {
            "memory": {**asdict(memory), "host_bytes": memory.host_bytes},
            "traffic": asdict(usage(optimizer=optimizer).traffic),
            "read_ahead_bytes": sum(read_ahead),
        }
    optimizer.zero_grad()
    gc.collect()
    return_freed_memory()
    files = list(scratch_files())
    result |= {
        "rss_bytes": resident_bytes(),
        "page_cache_bytes": sum(page_cache_bytes(fd) for fd in files),
        "file_bytes": sum(os.fstat(fd).st_size for fd in files),
        "parameters": sum(p.numel() for p in parameters),
        "sizes": [p.numel() for p in parameters],
    }
    print(json.dumps(result))


def _example(*, quick: bool) -> tuple[torch.nn.Module, Iterator[torch.Tensor]]:
    model = gpt2(**SMALL if quick else {})
    generator = torch.Generator().manual_seed(1)
    shape = (2, 16) if quick else _BATCH
    batches = (
        torch.randint(model.config.vocab_size, shape, generator=generator)
        for _ in itertools.count()
    )
    return model, batches


def _optimizer(
    parameters: list[torch.nn.Parameter], options: argparse.Namespace
) -> torch.optim.Optimizer:
    if options.fraction is None:
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, fused=True)
    if options.fraction == 0.0:
        return AdamW(parameters, lr=1e-3, weight_decay=0.0)
    return AdamW(
        parameters,
        lr=1e-3,
        weight_decay=0.0,
        states=options.fraction,
        dir=options.directory,
        durability="none",
        ram_budget=options.budget,
    )


def _train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[torch.Tensor]
) -> dict[str, Any]:
    losses, steps, updates = [], [], []
    backward = update = 0.0
    for _ in range(_STEPS):
        start = time.monotonic()
        ids = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        backward = time.monotonic()
        loss.backward()
        update = time.monotonic()
        optimizer.step()
        done = time.monotonic()
        optimizer.zero_grad()
        losses.append(loss.item())
        steps.append(time.monotonic() - start)
        updates.append(done - update)
    return {
        "losses": losses,
        "total_seconds": sum(steps),
        "step_seconds": steps,
        "optimizer_seconds": updates,
        "steady_step_seconds": statistics.median(steps[1:]),
        "steady_optimizer_seconds": statistics.median(updates[1:]),
        "last_backward": backward,
        "last_step": update,
    }


def scratch_files() -> Iterator[int]:
    """Yield the descriptors of this process's unlinked regular files."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            facts = os.fstat(int(entry.name))
        except OSError:  # the listing's own descriptor is closed by now
            continue
        if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0 and facts.st_size:
            yield int(entry.name)


def page_cache_bytes(fd: int) -> int:
    """Return how much of the file is in the page cache."""
    size = os.fstat(fd).st_size
    pages = -(-size // mmap.PAGESIZE)
    answer = (ctypes.c_ubyte * pages)()
    with mmap.mmap(fd, size) as mapping:
        anchor = ctypes.c_char.from_buffer(mapping)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        failed = libc.mincore(address, ctypes.c_size_t(size), answer)
        del anchor  # a mapping that something points into cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return mmap.PAGESIZE * sum(page & 1 for page in bytes(answer))


if __name__ == "__main__":
    main()
