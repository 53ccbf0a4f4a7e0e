"""Trainings on the simulated accelerator, timed: what `accelerator_model` runs in a process."""

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.accelerator.ways import Moved
from tensorstow import _native, usage
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.sharding import make_mesh
from tensorstow.fsdp.stow import stow
from tensorstow.optim.adam import AdamW
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.policy import PipelinePolicy

DRAM_BYTES = 26
"""Per bf16 parameter: m, v and the master's low half read and written, the weight too, the gradient
read."""
TOKENS = 4
_WARM_UP = 2  # the first step makes states, and schedules learn their order
_MEASURED = 5  # before the share that the device updates stays what it is
_LANES = {"copy down": "link down", "copy up": "link up", "host waits": "host waits"}
_TESTS = Path(__file__).resolve().parents[2] / "tests"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One training: its plan, how large the model is, and how fast what it runs on."""

    plan: str
    """JSON."""
    layers: int
    width: int
    chunk: int
    """Elements."""
    compute: float
    """Seconds of a step's forward and backward."""
    link: float
    """Bytes a second, in each direction; as the following."""
    dram: float
    disk: float
    """Read and written together."""
    steps: int
    """That are timed."""
    clip_period: int | None = None
    """One of so many steps is clipped, and the norm of each is computed; 0: none; None: no norm."""

    @property
    def elements(self) -> int:
        """Return how many numbers the model has."""
        return 8 * self.layers * self.width**2


@dataclass(frozen=True, slots=True)
class Span:
    """What took its time, in seconds since the steps that are timed began."""

    lane: str
    name: str
    start: float
    stop: float
    nbytes: int = 0


@dataclass(slots=True)
class Timed:
    """What was seen of a training."""

    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    moved: Moved = field(default_factory=Moved)
    """By a step."""
    compute: float = 0
    """Seconds of a step, counted."""
    device_share: float = 0
    """Of the elements: what the device updates."""
    spans: list[Span] = field(default_factory=list)


class Block(nn.Module):
    """Adds a perceptron to its input."""

    def __init__(self, width: int) -> None:
        """Make the layers."""
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add."""
        out: torch.Tensor = x + self.down(nn.functional.relu(self.up(x)))
        return out


class Model(nn.Module):
    """Blocks of one size, so that no end of the model weighs more than another."""

    def __init__(self, layers: int, width: int) -> None:
        """Make the blocks, the same at each call."""
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = x.float().pow(2).mean()
        return loss


def train(simulated: Any, config: RunConfig, directory: Path) -> Timed:  # noqa: ANN401  # a module
    """Train by ``config``; everything is as slow as the config says."""
    _slow_down(simulated, config)
    device = torch.device(simulated.DEVICE, 0)
    model, optimizer = _placed(config, device, directory)
    x = torch.ones(TOKENS, config.width, dtype=torch.bfloat16, device=device)
    period = config.clip_period
    warm_up = _WARM_UP + _MEASURED * (Plan.from_json(config.plan).update_on is not None)
    for _ in _steps(model, optimizer, x, warm_up, period):
        pass
    optimizer.wait()
    torch.accelerator.synchronize()
    simulated.take_counts()
    before = _on_disk(model, optimizer)
    optimizer.start_trace()
    simulated.start_trace()
    found = Timed()
    last = zero = time.monotonic()
    for spans in _steps(model, optimizer, x, config.steps, period):
        now = time.monotonic()
        found.seconds.append(now - last)
        found.spans += spans
        last = now
    after, counts = _on_disk(model, optimizer), simulated.take_counts()
    moved = Moved(counts["bytes_down"], counts["bytes_up"], *(after[i] - before[i] for i in (0, 1)))
    found.moved = moved.each(config.steps)
    found.device_share = usage(optimizer=optimizer).traffic.device_share
    optimizer.wait()
    torch.accelerator.synchronize()
    for _, name, start, stop, nbytes in simulated.take_trace():
        found.spans.append(Span(_LANES.get(name, "compute"), name, start, stop, nbytes))
    for e in optimizer.trace():
        found.spans.append(Span(e.lane, f"{e.lane} {e.chunk}", e.start, e.stop, e.nbytes))
    found.spans = [
        Span(s.lane, s.name, s.start - zero, s.stop - zero, s.nbytes) for s in found.spans
    ]
    computed = sum(s.stop - s.start for s in found.spans if s.lane == "compute")
    found.compute = computed / config.steps
    optimizer.close()
    return found


def _steps(
    model: nn.Module, optimizer: StowedAdam, x: torch.Tensor, count: int, clip_period: int | None
) -> Iterator[Sequence[Span]]:
    """Take steps; yield behind each what the host did in it, by ``time.monotonic()``."""
    for number in range(count):
        moments = [time.monotonic()]
        loss = model(x)
        moments.append(time.monotonic())
        loss.backward()
        moments.append(time.monotonic())
        if clip_period is not None:
            is_clipped = clip_period > 0 and number % clip_period == clip_period // 2
            optimizer.clip_grad_norm_(1e-9 if is_clipped else 1e9)
        optimizer.step()
        optimizer.zero_grad()
        moments.append(time.monotonic())
        names = ("forward", "backward", "step")
        yield [Span("host", n, moments[i], moments[i + 1]) for i, n in enumerate(names)]


def _slow_down(simulated: Any, config: RunConfig) -> None:  # noqa: ANN401
    # The first block's input has no gradient, which is one product less.
    flops = 6 * TOKENS * config.elements - 2 * TOKENS * 4 * config.width**2
    simulated.set_compute(config.compute / flops)
    simulated.set_delays(0, config.link, 0)
    _native.slow_down(disk_bytes_per_s=config.disk, update_elements_per_s=config.dram / DRAM_BYTES)


def _placed(
    config: RunConfig, device: torch.device, directory: Path
) -> tuple[nn.Module, StowedAdam]:
    plan = Plan.from_json(config.plan)
    policy = PipelinePolicy(chunk_elements=config.chunk, backend="threads")
    make = partial(AdamW, lr=1e-4, policy=policy)
    given: dict[str, Any] = {}
    if Tier.DISK in {plan.states, plan.parameters}:
        given["dir"] = directory
    if plan.states == Tier.DISK:
        make = partial(make, durability="none")
    model: nn.Module = Model(config.layers, config.width)
    if plan.parameters == Tier.DEVICE:
        model.to(device)
    else:
        given["mesh"] = make_mesh(device, stage=plan.stage, replicas=plan.replicas)
    return stow(model, make, plan=plan, **given)


def _on_disk(model: nn.Module, optimizer: StowedAdam) -> tuple[int, int]:
    states, weights = usage(optimizer=optimizer).traffic, parameter_bytes(model)
    return states.bytes_read + weights.bytes_read, states.bytes_written + weights.bytes_written


def main() -> None:
    """Read configs as JSON, print what was seen of each: a line, or why it failed."""
    sys.path.insert(0, str(_TESTS))
    simulated = importlib.import_module("simulated")  # which registers the device
    torch.set_num_threads(1)
    for given in json.load(sys.stdin)["configs"]:
        with tempfile.TemporaryDirectory(dir=sys.argv[1]) as directory:
            found = train(simulated, RunConfig(**given), Path(directory))
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
