"""A run of one rank that two ranks resume, and back: seconds and bytes, against raw transfers.

Each life is a process per rank, started by torchrun. Resuming moves all states and weights to the
stores of the new ranks, commits them, reads the weights, and removes the old stores. The raw
transfers are of the bytes that moved, a read and a write in turn, each rank its part at the same
time, and one sync.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cpu.raw import RawFile, alternate, cut
from benchmarks.measure import Figure, Sample, Settings, at_most, process_io, ratio
from tensorstow import AdamW, Plan, stow
from tensorstow.checkpoint import reshard
from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
from tensorstow.optim import stowed_adam
from tensorstow.report.rss import peak_bytes, resident_bytes
from tensorstow.states.policy import PipelinePolicy

_WIDTH, _LAYERS = 4096, 9
"""1.8 GB of states and weights in bf16."""
_BYTES = 12
"""Of a parameter in bf16, with the states that are its default: "split"."""
_PIECE = 2 << 20
_MOST_TURNS = 3
_PLAN = Plan(parameters="host", states="disk")


def figures(settings: Settings) -> Iterator[Figure]:
    """Change the number of ranks there and back, in turns."""
    lives: dict[str, list[list[dict[str, float]]]] = {"1 to 2": [], "2 to 1": []}
    with tempfile.TemporaryDirectory(
        dir=settings.scratch(12 << 30), prefix=".tensorstow-bench-"
    ) as directory:
        _live(directory, 1, quick=settings.quick)
        for _ in range(1 if settings.quick else min(settings.pairs, _MOST_TURNS)):
            lives["1 to 2"].append(_live(directory, 2, quick=settings.quick))
            lives["2 to 1"].append(_live(directory, 1, quick=settings.quick))
    for name, turns in lives.items():
        samples = {
            way: Sample(tuple(max(rank[way] for rank in life) for life in turns))
            for way in ("move", "resume", "raw")
        }
        what = f"resuming on another number of ranks, {name}"
        moved = sum(rank["moved"] for rank in turns[-1])
        limit = None if settings.quick else at_most(1.2)
        for way, label, own in (("move", "moving rows", limit), ("resume", "all of it", None)):
            figure = ratio(f"{what}: {label} / raw reads and writes", own, samples, way, "raw")
            figure.detail["moved_bytes"] = moved
            figure.detail["note"] = f"{samples[way].median:.2f} s for {moved / 1e9:.2f} GB"
            yield figure
        for way, limit in (("written", at_most(0.01)), ("read", None)):
            beyond = max(sum(rank[way] for rank in life) / moved - 1 for life in turns)
            yield Figure(
                f"{what}: {way} beyond what moves",
                None if settings.quick else limit,
                max(0.0, beyond),
                "of it",
            )
        peak = max(rank["peak"] for life in turns for rank in life)
        yield Figure(f"{what}: peak memory of a rank beyond its weights", None, peak / 1e6, "MB")


def _live(directory: str, ranks: int, *, quick: bool) -> list[dict[str, float]]:
    """Return what each rank of a life measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    command += ["-m", "benchmarks.cpu.reshard", directory, *(["--quick"] if quick else [])]
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    reports = sorted(Path(directory).glob("report-*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in reports]
    for path in reports:
        path.unlink()
    return found


# --- a rank ---


def _measure(directory: Path, *, quick: bool) -> dict[str, Any]:
    width, layers = (64, 2) if quick else (_WIDTH, _LAYERS)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    make = partial(AdamW, lr=1e-4, dir=directory / "run", commit_every=None)
    model, optimizer = stow(model.to(torch.bfloat16), make, plan=_PLAN)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forgets the peak
    moving: list[float] = []

    def move_rows(*given: Any) -> None:  # noqa: ANN401  # as the function takes them
        begun = time.perf_counter()
        reshard.move_rows(*given)
        moving.append(time.perf_counter() - begun)

    stowed_adam.move_rows = move_rows
    dist.barrier()
    before, resident, start = process_io(), resident_bytes(), time.perf_counter()
    step = optimizer.resume()
    dist.barrier()
    seconds, after = time.perf_counter() - start, process_io()
    peak = (peak_bytes() or 0) - resident
    if step is None:
        model(torch.ones(1, width, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.commit()
    optimizer.close()
    moved = sum(p.numel() for p in model.parameters()) // dist.get_world_size() * _BYTES
    raw = _raw(directory, moved)
    found = {
        "move": sum(moving),
        "resume": seconds,
        "raw": raw,
        "moved": moved,
        "read": after[0] - before[0],
        "written": after[1] - before[1],
        "peak": peak,
    }
    rank = dist.get_rank()
    (directory / f"report-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return found


def _raw(directory: Path, nbytes: int) -> float:
    """Return the seconds that reading and writing ``nbytes`` takes, beside the other ranks."""
    policy = PipelinePolicy()
    engine = open_engine(policy.backend, depth=policy.depth)
    total = max(nbytes // _PIECE, 1) * _PIECE
    with scratch_file(engine, directory, 2 * total) as file:
        raw = RawFile(engine, file.fd, 48 << 20)
        raw.run(cut("write", 0, total, _PIECE))
        os.fdatasync(file.fd)
        dist.barrier()
        start = time.perf_counter()
        raw.run(alternate(cut("read", 0, total, _PIECE), cut("write", total, 2 * total, _PIECE)))
        os.fdatasync(file.fd)
        dist.barrier()
        return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    _measure(options.directory, quick=options.quick)
