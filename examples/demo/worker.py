"""One row of the demo in its own process: ``python -m demo.worker``.

It reads the number of steps of its next turn from standard input, one number per line, and ends at
the end of input. It writes lines of JSON to the file descriptor of ``--descriptor``: before it
reads, ``{"waits": 2}`` with the steps taken so far; when work begins, ``{"step": 0, "part":
"forward"}``; and the result as the last line. Standard output and error stay free for libraries.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import torch
from torch import nn

from demo.configurations import (
    ANCHOR,
    CONFIGURATIONS,
    FULL,
    SMALL,
    Configuration,
    ModelSize,
)
from demo.result import RunResult
from demo.training import Clock, Progress, Training, make_model, make_optimizer
from demo.ulp_difference import compare_one_step
from tensorstow.cli.digests import checksum
from tensorstow.cli.process import say, teller
from tensorstow.fsdp.usage import Usage, usage
from tensorstow.io.local_share import usable_cores
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.report.rss import peak_bytes, resident_bytes, return_freed_memory
from tensorstow.report.samples import MemorySampler
from tensorstow.report.spans import Sample, TimeSpan, span_of
from tensorstow.states.layout import Family
from tensorstow.states.memory import StateMemory, predict_memory
from tensorstow.states.traffic import Traffic


def main(arguments: list[str] | None = None) -> None:
    """Run the configuration that the arguments name."""
    parser = argparse.ArgumentParser(prog="demo.worker", description=__doc__)
    parser.add_argument("--row", choices=[row.key for row in CONFIGURATIONS], required=True)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    row = next(row for row in CONFIGURATIONS if row.key == options.row)
    with os.fdopen(options.descriptor, "w", encoding="utf-8") as pipe:
        scale = SMALL if options.small else FULL
        turns = read_turns(sys.stdin, pipe)
        result = run_row(row, scale, turns, options.directory, teller(pipe))
        say(pipe, result.to_json())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that every process of the demo has."""
    parser.add_argument("--directory", required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    parser.add_argument("--small", action="store_true")


def read_turns(orders: TextIO, pipe: TextIO) -> Iterator[int]:
    """Yield the number of steps of each turn, as they are requested."""
    taken = 0
    while True:
        say(pipe, json.dumps({"waits": taken}))
        order = orders.readline()
        if not order:
            return
        yield int(order)
        taken += int(order)


@dataclass(slots=True)
class TurnClock:
    """The turns of this process; the time between them is left out of what is shown."""

    windows: list[tuple[float, float]] = field(default_factory=list)

    def moment(self, time: float) -> float | None:
        """Return the time spent in turns up to ``time``; None outside of a turn."""
        before = 0.0
        for start, stop in self.windows:
            if start <= time <= stop:
                return before + time - start
            before += stop - start
        return None

    def cut(self, span: TimeSpan) -> TimeSpan:
        """Return ``span`` on that clock, within the turn in which it began."""
        start = self.moment(span.start)
        if start is None:  # begun between turns: it is shown from the next one on
            later = [begin for begin, _ in self.windows if begin > span.start]
            start = self.moment(later[0] if later else self.windows[-1][1]) or 0.0
        stop = self.moment(span.stop)
        return replace(span, start=start, stop=max(start, start if stop is None else stop))


def run_row(
    row: Configuration, scale: ModelSize, turns: Iterable[int], directory: str, progress: Progress
) -> RunResult:
    """Train with a configuration, one turn for each number in ``turns``, and measure."""
    torch.set_num_threads(usable_cores())
    progress(-1, "build")
    model = make_model(scale)
    optimizer = make_optimizer(row, scale, model, directory)
    stowed = optimizer if isinstance(optimizer, StowedAdam) else None
    clock, mine, taken = Clock(progress), TurnClock(), []
    training = Training(model, optimizer, scale, clock)
    checksums = []
    with MemorySampler({}) as sampler:
        if stowed is not None:
            stowed.start_trace()
        for steps in turns:
            start = time.monotonic()
            sampler.take()
            training.take(steps)
            if stowed is not None:
                with clock.measure(-1, "last writes"):
                    stowed.synchronize()  # what is under way must not run in another row's turn
            sampler.take()
            mine.windows.append((start, time.monotonic()))
            taken.append(steps)
            return_freed_memory()  # others have their turn now
            if row.key == ANCHOR:
                checksums.append(checksum(model))
        end = resident_bytes()
    resident = sorted(sampler.held["process"].kept, key=lambda sample: sample.time)
    peak = peak_bytes() or max(sample.nbytes for sample in resident)
    events = stowed.trace() if stowed is not None else []
    used = Usage() if stowed is None else usage(optimizer=stowed)
    traffic = used.traffic or Traffic(0, 0, 0, 0, 0.0)
    moments = [(mine.moment(sample.time), sample.nbytes) for sample in resident]
    return RunResult(
        key=row.key,
        parameters=scale.parameters,
        losses=tuple(training.losses),
        checksum=checksum(model),
        spans=tuple(mine.cut(span) for span in [*clock.spans, *map(span_of, events)]),
        rss=tuple(Sample(m, nbytes) for m, nbytes in moments if m is not None),
        peak_rss_bytes=peak,
        end_rss_bytes=end,
        predicted=predict(row, scale, model),
        measured=used.states or held_by_torch(optimizer),
        allocated_file_bytes=unlinked_file_bytes(directory) if row.is_offloaded else 0,
        bytes_read=traffic.bytes_read,
        bytes_written=traffic.bytes_written,
        bytes_spared=traffic.bytes_spared,
        turns=tuple(taken),
        checksums=tuple(checksums),
        from_torch=compare_one_step(training) if row.key == ANCHOR else None,
    )


def predict(row: Configuration, scale: ModelSize, model: nn.Module) -> StateMemory | None:
    """Return the predicted memory of the states, from the sizes of the parameters alone."""
    if row.optimizer == "stow":
        return None  # its chunks follow the units of the model
    policy = scale.policy(row)
    return predict_memory(
        [(Family(torch.float32, amsgrad=False), [p.numel() for p in model.parameters()])],
        disk_fraction=row.fraction,
        chunk_elements=policy.chunk,
        slots=policy.most_slots,
    )


def held_by_torch(optimizer: torch.optim.Optimizer) -> StateMemory:
    """Return the bytes of the states of torch's own optimizer, without the step counts."""
    nbytes = sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step"
    )
    return StateMemory(nbytes, nbytes, 0, 0, 0)


def unlinked_file_bytes(directory: str) -> int:
    """Return the bytes that the filesystem has allocated to this process's unnamed files there."""
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


if __name__ == "__main__":
    main()
