"""Commits: what one costs, what pinning one costs, what resuming reads, and bytes per parameter."""

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.cpu.raw import RawFile, alternate, cut
from benchmarks.measure import (
    Figure,
    Settings,
    at_most,
    exactly,
    interleave,
    process_io,
    ratio,
    use_all_cores,
)
from tensorstow import usage
from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
from tensorstow.optim.adam import AdamW
from tensorstow.states.policy import PipelinePolicy

_COMMITTED = 128 << 20  # parameters of the run that commits every step
_LARGE = 1_000_000_000
_TENSORS = 8
_FORMATS = {  # asked bytes per parameter and step, each way
    (torch.bfloat16, "split"): 10.0,
    (torch.bfloat16, "bf16"): 6.0,
    (torch.bfloat16, "int8"): 3.2,
    (torch.float32, "fp32"): 8.0,
}


def figures(settings: Settings) -> Iterator[Figure]:
    """Measure commits, pins, resumes and bytes."""
    use_all_cores()
    directory = settings.scratch(40 << 30)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".tensorstow-bench-") as folder:
        yield from _bytes(Path(folder), settings)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".tensorstow-bench-") as folder:
        yield from _commit_every_step(Path(folder), settings)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".tensorstow-bench-") as folder:
        yield from _pin_and_resume(Path(folder), settings)


def _parameters(count: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    parameters = [
        torch.nn.Parameter(torch.full((count // _TENSORS,), 0.5, dtype=dtype))
        for _ in range(_TENSORS)
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    return parameters


def _bytes(directory: Path, settings: Settings) -> Iterator[Figure]:
    """Count what moves per parameter, by our counters and by the system's."""
    count = 1 << 22 if settings.quick else 1 << 26
    for (dtype, name), asked in _FORMATS.items():
        where = directory / f"{name}-{dtype}".replace("torch.", "")
        where.mkdir()
        parameters = _parameters(count, dtype)
        optimizer = AdamW(parameters, states="disk", dir=where, state_format=name)
        optimizer.step()
        optimizer.synchronize()
        before, system = usage(optimizer=optimizer).traffic, process_io()
        for _ in range(3):
            optimizer.step()
            optimizer.synchronize()
        after, later = usage(optimizer=optimizer).traffic, process_io()
        elements = 3 * sum(p.numel() for p in parameters)
        read = (after.bytes_read - before.bytes_read) / elements
        written = (after.bytes_written - before.bytes_written) / elements
        detail = {
            "proc_io_read_per_parameter": (later[0] - system[0]) / elements,
            "proc_io_written_per_parameter": (later[1] - system[1]) / elements,
            "spared_per_parameter": (after.bytes_spared - before.bytes_spared) / elements,
        }
        limit = at_most(asked) if name == "int8" else exactly(asked)
        kind = "bf16" if dtype == torch.bfloat16 else "fp32"
        title = f"{kind} model, {name}: bytes per parameter and step"
        yield Figure(f"{title}, read", limit, read, "B", detail)
        yield Figure(f"{title}, written", limit, written, "B", detail)
        optimizer.close()


def _commit_every_step(directory: Path, settings: Settings) -> Iterator[Figure]:
    """Compare a step that commits with raw I/O of the same bytes and one sync at the end."""
    count = 1 << 22 if settings.quick else _COMMITTED
    parameters = _parameters(count, torch.bfloat16)
    optimizer = AdamW(parameters, states="disk", dir=directory, commit_every=1)
    for _ in range(3):  # both extents of every chunk exist after two commits
        optimizer.step()
    optimizer.synchronize()
    before = usage(optimizer=optimizer).traffic

    def step() -> None:
        optimizer.step()
        optimizer.synchronize()

    step()
    after = usage(optimizer=optimizer).traffic
    read = after.bytes_read - before.bytes_read
    written = after.bytes_written - before.bytes_written
    policy = PipelinePolicy()
    engine = open_engine(policy.backend, depth=policy.depth)
    piece = 2 << 20
    total = (read + written) // piece * piece
    with scratch_file(engine, directory, total) as file:
        raw = RawFile(engine, file.fd, usage(optimizer=optimizer).states.ring_bytes)
        writes = cut("write", 0, written // piece * piece, piece)
        reads = cut("read", 0, read // piece * piece, piece)
        raw.run(cut("write", 0, total, piece))
        both = [*alternate(reads, writes[: len(reads)]), *writes[len(reads) :]]

        def plain() -> None:
            raw.run(both)
            os.fdatasync(file.fd)

        samples = interleave({"committing step": step, "raw": plain}, settings.pairs)
    figure = ratio(
        "a commit every step / raw I/O of the same bytes and one fdatasync",
        at_most(1.05),
        samples,
        "committing step",
        "raw",
    )
    elements = sum(p.numel() for p in parameters)
    figure.detail["bytes_per_parameter"] = {"read": read / elements, "written": written / elements}
    yield figure
    optimizer.close()


def _pin_and_resume(directory: Path, settings: Settings) -> Iterator[Figure]:
    """Pin and resume the states of a billion parameters."""
    count = 1 << 22 if settings.quick else _LARGE
    parameters = _parameters(count, torch.bfloat16)
    optimizer = AdamW(parameters, states="disk", dir=directory, commit_every=None)
    optimizer.step()
    optimizer.commit()
    seconds, written = [], []
    for turn in range(5):
        before, start = process_io()[1], time.perf_counter()
        optimizer.snapshot(f"pin-{turn}")
        seconds.append(time.perf_counter() - start)
        written.append(process_io()[1] - before)
    billions = sum(p.numel() for p in parameters) / 1e9
    what = f"pinning a commit of {billions:.3g}B parameters"
    yield Figure(f"{what}: time", at_most(0.1), sorted(seconds)[2], "s", {"seconds": seconds})
    yield Figure(f"{what}: written", at_most(1.0), max(written) / (1 << 20), "MiB")
    optimizer.close()
    del optimizer
    gc.collect()
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    before = process_io()[0]
    start = time.perf_counter()
    again = AdamW(parameters, states="disk", dir=directory, commit_every=None)
    again.resume()
    elapsed = time.perf_counter() - start
    read = process_io()[0] - before
    weights = sum(p.numel() * p.element_size() for p in parameters)
    manifest = sum(p.stat().st_size for p in directory.glob("manifest.sqlite*"))
    detail = {"bytes_read": read, "weights": weights, "manifest": manifest, "seconds": elapsed}
    yield Figure(
        "resuming it: bytes read beyond weights and manifest",
        at_most(1.0),
        max(0, read - weights - manifest) / (1 << 20),
        "MiB",
        detail,
    )
    yield Figure("resuming it: time", None, elapsed, "s")
    again.close()
