"""One row of the demo in a process of its own: ``python -m tensorstow.cli.demo.child``.

Writes lines of JSON to the descriptor that it is given: ``{"step": 0, "part": "forward"}`` as work
begins, and the result as the last one. Standard output and error stay free for libraries.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch
from torch import nn

from tensorstow.base.cores import usable_cores
from tensorstow.cli.demo.result import RowResult, Sample, Span
from tensorstow.cli.demo.rows import FULL, ROWS, SMALL, Row, Scale
from tensorstow.cli.demo.rss import RssCurve, peak_bytes, resident_bytes, return_freed_memory
from tensorstow.cli.demo.training import (
    Clock,
    Progress,
    checksum,
    make_model,
    make_optimizer,
    train,
)
from tensorstow.optim.states.layout import Family
from tensorstow.optim.states.memory import StateMemory, predict_memory
from tensorstow.optim.states.pipeline import TraceEvent, Traffic
from tensorstow.optim.stowed import StowedAdam


def main(arguments: list[str] | None = None) -> None:
    """Run the row that the arguments name."""
    parser = argparse.ArgumentParser(prog="tensorstow.cli.demo.child", description=__doc__)
    parser.add_argument("--row", choices=[row.key for row in ROWS], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args(arguments)
    row = next(row for row in ROWS if row.key == given.row)
    with os.fdopen(given.descriptor, "w", encoding="utf-8") as pipe:

        def progress(step: int, part: str) -> None:
            _say(pipe, json.dumps({"step": step, "part": part}))

        scale = SMALL if given.small else FULL
        result = run_row(row, scale, given.steps, given.directory, progress)
        _say(pipe, result.to_json())


def run_row(row: Row, scale: Scale, steps: int, directory: str, progress: Progress) -> RowResult:
    """Train under ``row`` and measure."""
    torch.set_num_threads(usable_cores())
    progress(-1, "build")
    model = make_model(scale)
    optimizer = make_optimizer(row, scale, model, directory)
    stowed = optimizer if isinstance(optimizer, StowedAdam) else None
    clock = Clock(progress)
    with RssCurve() as curve:
        if stowed is not None:
            stowed.start_trace()
        zero = time.monotonic()
        losses = train(model, optimizer, scale, steps, clock)
        if stowed is not None:
            with clock.measure(-1, "last writes"):
                stowed.synchronize()
        return_freed_memory()
        end = resident_bytes()
    peak = peak_bytes() or max(nbytes for _, nbytes in curve.samples)
    events = stowed.trace() if stowed is not None else []
    traffic = stowed.traffic() if stowed is not None else Traffic(0, 0, 0, 0, 0.0)
    return RowResult(
        key=row.key,
        parameters=sum(p.numel() for p in model.parameters()),
        losses=tuple(losses),
        checksum=checksum(model),
        spans=tuple(_from_zero(span, zero) for span in [*clock.spans, *map(_as_span, events)]),
        rss=tuple(Sample(moment - zero, nbytes) for moment, nbytes in curve.samples),
        peak_rss_bytes=peak,
        end_rss_bytes=end,
        predicted=predict(row, scale, model),
        measured=stowed.memory() if stowed is not None else held_by_torch(optimizer),
        allocated_file_bytes=unlinked_file_bytes(directory) if row.is_offloaded else 0,
        bytes_read=traffic.bytes_read,
        bytes_written=traffic.bytes_written,
        bytes_spared=traffic.bytes_spared,
    )


def predict(row: Row, scale: Scale, model: nn.Module) -> StateMemory:
    """Return what the states of ``row`` will take, from the sizes of the parameters alone."""
    policy = scale.policy(row)
    return predict_memory(
        [p.numel() for p in model.parameters()],
        Family(torch.float32, amsgrad=False),
        disk_fraction=row.fraction,
        chunk_elements=policy.chunk_elements,
        slots=policy.most_slots,
    )


def held_by_torch(optimizer: torch.optim.Optimizer) -> StateMemory:
    """Return the bytes of the states of torch's own optimizer, the step counts left out."""
    nbytes = sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step"
    )
    return StateMemory(nbytes, nbytes, 0, 0, 0)


def unlinked_file_bytes(directory: str) -> int:
    """Return what the filesystem has allocated to this process's nameless files there."""
    device = Path(directory).stat().st_dev
    files = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            facts = entry.stat()
        except OSError:  # the listing's own descriptor is closed by now
            continue
        if facts.st_dev == device and facts.st_nlink == 0:
            files[facts.st_ino] = facts.st_blocks * 512
    return sum(files.values())


def _as_span(event: TraceEvent) -> Span:
    return Span(
        event.lane, event.lane, event.start, event.stop, chunk=event.chunk, nbytes=event.nbytes
    )


def _from_zero(span: Span, zero: float) -> Span:
    # A trace begins before the first step: prefetching in hooks does not, so nothing is negative.
    return replace(span, start=span.start - zero, stop=span.stop - zero)


def _say(pipe: TextIO, line: str) -> None:
    pipe.write(line + "\n")
    pipe.flush()


if __name__ == "__main__":
    main()
