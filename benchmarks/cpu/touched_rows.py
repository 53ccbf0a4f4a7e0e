"""Steps that defer updates of rows that they do not touch, and the same with dense updates.

An embedding of 50,257 words by 1,024 (206 MB, 412 MB of states on disk) and a small head are
trained in fresh processes by words that Zipf's law draws, with a schedule and clipping. The run
that defers is closed in the middle, and goes on in a new optimizer from its last commit.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensorstow
from benchmarks.cpu.generation import read_raw
from benchmarks.measure import Figure, Settings, as_child, at_most, digest_of, exactly, run_alone
from tensorstow import AdamW

_MODULE = "benchmarks.cpu.touched_rows"
_WORDS, _WIDTH, _TOKENS, _STEPS, _TRACED = 50_257, 1024, 2048, 500, 64
_WAYS = ("dense", "deferred", "replayed")


def figures(settings: Settings) -> Iterator[Figure]:
    """Run each way once: a dense step moves 0.8 GB."""
    with tempfile.TemporaryDirectory(dir=settings.scratch(4 << 30)) as folder:
        dense, ours, replayed = (
            run_alone(_MODULE, way, f"{folder}/{way}", quick=settings.quick) for way in _WAYS
        )
    what = "untouched rows"
    different = len({dense["digest"], ours["digest"]})
    yield Figure(f"{what}: different weights and states after all steps", exactly(1), different, "")
    yield Figure(
        f"{what}: bytes of states moved / of dense updates, less the share of rows touched",
        None if settings.quick else at_most(0.05),
        ours["moved"] / dense["moved"] - ours["touched"],
        "",
        detail={"share of rows touched in a step": ours["touched"]},
    )
    spared = (dense["moved"] / dense["steps"] - ours["moved"] / ours["steps"]) * replayed["steps"]
    yield Figure(
        f"{what}: seconds of all updates, those made later too / of raw reads of the bytes spared",
        None if settings.quick else at_most(1.0),
        replayed["updating"] / (spared / replayed["raw bytes per second"]),
    )
    seconds = {way: run["seconds"] for way, run in zip(_WAYS, (dense, ours), strict=False)}
    yield Figure(
        f"{what}: seconds of forward, backward and step / of dense updates",
        None,
        seconds["deferred"] / seconds["dense"],
        detail={"median seconds": seconds},
    )


# --- the child ---


class _Words(nn.Module):
    def __init__(self, *, quick: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        count, width = (500, 64) if quick else (_WORDS, _WIDTH)
        self.embed = nn.Embedding(count, width)
        self.head = nn.Linear(width, 8)
        self.frequencies = 1 / torch.arange(1, count + 1, dtype=torch.float64)

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        ids = torch.multinomial(self.frequencies, _TOKENS, replacement=True, generator=generator)
        self.touched = len(ids.unique()) / len(self.embed.weight)
        return self.head(self.embed(ids)).square().mean()


def _measure(way: str, directory: str, *, quick: bool) -> dict[str, Any]:
    Path(directory).mkdir()
    steps = 8 if quick else _TRACED if way == "replayed" else _STEPS
    model = _Words(quick=quick)
    optimizer = _optimizer_of(model, way, directory)
    found: dict[str, list[float]] = {"seconds": [], "touched": []}
    moved = 0
    if way == "replayed":
        optimizer.start_trace()
    for step in range(steps):
        if way == "deferred" and step == steps // 2:
            optimizer.commit()
            moved += _moved(optimizer)
            optimizer.close()
            model = _Words(quick=quick)
            optimizer = _optimizer_of(model, way, directory)
            optimizer.resume()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + math.cos(math.pi * step / steps)) / 2
        start = time.perf_counter()
        model(step).backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        found["seconds"].append(time.perf_counter() - start)
        found["touched"].append(model.touched)
    optimizer.wait()
    optimizer.synchronize()
    moved += _moved(optimizer)
    result = {
        "steps": steps,
        "moved": moved,
        "touched": statistics.mean(found["touched"]),
        "seconds": statistics.median(found["seconds"]),
        "digest": _digest(model, optimizer),
    }
    if way == "replayed":
        updates = [e for e in optimizer.trace() if e.lane.startswith("update")]
        result["updating"] = sum(event.stop - event.start for event in updates)
        result["raw bytes per second"] = _raw_rate(Path(directory), quick=quick)
    optimizer.close()
    return result


def _optimizer_of(model: nn.Module, way: str, directory: str) -> AdamW:
    return AdamW(
        model.parameters(),
        weight_decay=0.1,
        states="disk",
        dir=directory,
        commit_every=None,
        durability="commit" if way == "deferred" else "none",
        module=model,
        overlap="none",
        defer_untouched=way != "dense",
    )


def _moved(optimizer: AdamW) -> int:
    traffic = tensorstow.usage(optimizer=optimizer).traffic
    return 0 if traffic is None else traffic.bytes_read + traffic.bytes_written


def _digest(model: nn.Module, optimizer: AdamW) -> int:
    """Return one number for the bits of all weights and moments."""
    values = list[torch.Tensor](model.parameters())
    for state in optimizer.state_dict()["state"].values():
        values += [state["exp_avg"], state["exp_avg_sq"]]
    return digest_of(values)


def _raw_rate(directory: Path, *, quick: bool) -> float:
    """Return bytes per second of reads past the page cache, in pieces of a MiB."""
    nbytes = (8 << 20) if quick else (1 << 30)
    file = directory / "raw"
    file.write_bytes(bytes(nbytes))
    return nbytes / read_raw(file, nbytes)


if __name__ == "__main__":
    as_child(_measure, _WAYS)
