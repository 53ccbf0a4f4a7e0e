"""Eight micro-batches with weights on disk: in vertical order against accumulation, on the CPU.

What a step in vertical order is measured by is the larger of two others: the same step with weights
in host memory, and reading and writing the bytes that it moves with nothing computed. All ways
update beside backward, each unit when its last micro-batch has left it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.cpu.raw import RawFile, Transfer, cut
from benchmarks.measure import (
    Figure,
    Settings,
    at_most,
    interleave,
    ratio,
    use_all_cores,
)
from tensorstow.base.plan import Plan
from tensorstow.fsdp.report import ParameterPart
from tensorstow.fsdp.stow import stow
from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
from tensorstow.optim.adam import AdamW
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.policy import PipelinePolicy

_MICRO_BATCHES = 8
_WIDTH, _BLOCKS, _TOKENS = 1024, 12, 32
_SMALL_WIDTH, _SMALL_BLOCKS, _SMALL_TOKENS = 64, 6, 4
_PIECE = 4 << 20
_UNITS_IN_MEMORY = 4


class _Block(nn.Module):
    """A multilayer perceptron beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(grown)


class _Run:
    """One way to train the blocks, and what it moves."""

    def __init__(self, plan: Plan, directory: Path, *, quick: bool) -> None:
        width, blocks = (_SMALL_WIDTH, _SMALL_BLOCKS) if quick else (_WIDTH, _BLOCKS)
        torch.manual_seed(0)
        model = nn.Sequential(*(_Block(width) for _ in range(blocks)))
        unit = sum(p.nbytes for p in model[0].parameters()) + (1 << 16)
        on_disk = plan.parameters == "disk"
        if on_disk:
            plan = plan.but(weight_ram_budget=_UNITS_IN_MEMORY * unit)
        make = partial(AdamW, lr=1e-5, durability="none")
        where = directory if on_disk else None
        self.model, self.optimizer = stow(model, make, plan=plan, dir=where)
        tokens = _SMALL_TOKENS if quick else _TOKENS
        self.batch = torch.randn(_MICRO_BATCHES, tokens, width)
        self.passes = plan.accumulation_steps
        self.reads: list[int] = []
        """Bytes of weights that each step has read, and of those it has written."""
        self.writes: list[int] = []

    def step(self) -> None:
        """Take one step."""
        part = _part_of(self.optimizer)
        before = part.moved()
        for x in self.batch.chunk(self.passes):
            (self.model(x).square().mean() / self.passes).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        after = part.moved()
        self.reads.append(after["weights read"] - before["weights read"])
        self.writes.append(after["weights written"] - before["weights written"])


def figures(settings: Settings) -> Iterator[Figure]:
    """Measure steps of 100M fp32 parameters, states in host memory."""
    use_all_cores()
    directory = settings.scratch(4 << 30)
    in_memory = Plan(overlap="backward")
    on_disk = in_memory.but(parameters="disk")
    plans = {
        "vertical": on_disk.but(micro_batches=_MICRO_BATCHES),
        "accumulation": on_disk.but(accumulation_steps=_MICRO_BATCHES),
        "vertical, weights in host memory": in_memory.but(micro_batches=_MICRO_BATCHES),
    }
    with ExitStack() as opened:
        runs = {way: _Run(plan, directory, quick=settings.quick) for way, plan in plans.items()}
        for run in runs.values():
            opened.callback(run.optimizer.close)
        vertical, others = runs["vertical"], runs["accumulation"]
        vertical.step()  # its first forward looks at the model
        vertical.step()
        engine = open_engine(PipelinePolicy().backend, depth=PipelinePolicy().depth)
        size = max(vertical.reads[-1], vertical.writes[-1], _PIECE)
        file = opened.enter_context(scratch_file(engine, directory, size))
        raw = RawFile(engine, file.fd, 16 * _PIECE)
        raw.run(cut("write", 0, size, _PIECE))
        ways: dict[str, Callable[[], float | None]] = {way: run.step for way, run in runs.items()}
        moved = _transfers(vertical.reads[-1], vertical.writes[-1])
        samples = interleave({**ways, "raw I/O": lambda: raw.run(moved)}, settings.pairs)
    bound = max(
        ("vertical, weights in host memory", "raw I/O"), key=lambda name: samples[name].median
    )
    name = "8 micro-batches, weights on disk: step in vertical order / max(computing, raw I/O)"
    yield ratio(name, at_most(1.03), samples, "vertical", bound)
    name = "8 micro-batches, weights on disk: step in vertical order / accumulation"
    yield ratio(name, None, samples, "vertical", "accumulation")
    ours, theirs = vertical.reads[-1], others.reads[-1]
    yield Figure(
        "8 micro-batches, weights on disk: bytes read, vertical order / accumulation",
        at_most(1 / _MICRO_BATCHES),
        ours / theirs,
        detail={"vertical_bytes": ours, "accumulation_bytes": theirs},
    )


def _part_of(optimizer: StowedAdam) -> ParameterPart:
    return next(
        part
        for made in optimizer._recorded_parts  # noqa: SLF001  # a hook of the engine
        if isinstance(part := made(), ParameterPart)  # a hook of the engine
    )


def _transfers(read: int, written: int) -> list[Transfer]:
    """Return reads and writes of so many bytes, in turns."""
    reads, writes = cut("read", 0, read, _PIECE), cut("write", 0, written, _PIECE)
    paired = min(len(reads), len(writes))
    mixed = [each for pair in zip(reads, writes, strict=False) for each in pair]
    return mixed + reads[paired:] + writes[paired:]
