"""What DeepSpeed's door computes, against a plain loop: every stage, place and precision.

A cell is a dtype, clipping or none, one or four micro-batches, a stage, and where states and
parameters are: 144 on one rank and as many on two. The loop's Adam is the project's own in plain
torch (``formats.reference``), so nothing may differ by a bit. Beside it torch's AdamW is given the
same gradients: had it weights of its own, one that rounds to another fp16 value would lead it
elsewhere.
"""

import itertools
import json
import logging
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import tensorstow.deepspeed as deepspeed
from benchmarks.measure import Figure, Settings, at_most, exactly, lines_of
from tensorstow.formats.reference import (
    AdamState,
    adam_reference,
    adam_scalars,
    squared_norm_reference,
)

WIDTH, LAYERS, SAMPLES, STEPS, QUICK_STEPS = 16, 3, 4, 50, 3
LR, DECAY, LIMIT, SCALE_POWER = 3e-3, 0.1, 0.5, 8
RANKS = (1, 2)
FURTHEST = 6e-8
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHILD_SECONDS = 1500


class Arithmetic(NamedTuple):
    """What the numbers of a cell depend on."""

    dtype: str
    clips: bool
    micro_batches: int
    stage: int
    """3 computes as 2 does."""


class Trained(NamedTuple):
    """What a run of a cell or of the loop has in the end."""

    losses: list[float]
    """This rank's."""
    norms: list[float]
    masters: list[Tensor]
    weights: list[Tensor]


def figures(settings: Settings) -> Iterator[Figure]:
    """Run all cells on one rank and on two; compare each with the loop."""
    steps = QUICK_STEPS if settings.quick else STEPS
    for ranks in RANKS:
        launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks))
        with tempfile.TemporaryDirectory(dir=settings.scratch(1 << 20)) as folder:
            words = ("-m", "benchmarks.cpu.deepspeed_numbers", str(steps), folder)
            given = {"OMP_NUM_THREADS": "1"}
            printed = lines_of(*launcher, *words, seconds=_CHILD_SECONDS, given=given)
        for dtype, found in json.loads(printed[-1]).items():
            cells = f"{dtype}, {ranks} rank{'s' * (ranks > 1)}, {found['cells']} cells"
            yield Figure(
                f"{cells}: values that are not the plain loop's", exactly(0), found["differ"], ""
            )
            yield Figure(
                f"{cells}: furthest from torch's AdamW", at_most(FURTHEST), found["furthest"], ""
            )


class Layers(nn.Module):
    """Linear layers one after the other."""

    def __init__(self) -> None:
        """Make them from one seed."""
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of naming the classes ``y``."""
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(x.float(), y)


class Data:
    """Made-up samples: the same for the engine and the loop."""

    def __init__(self, micro_batches: int, ranks: int, steps: int) -> None:
        """Draw all of a run's."""
        shape = (steps, micro_batches, ranks, SAMPLES)
        drawn = torch.Generator().manual_seed(1)
        self.x = torch.randn(*shape, WIDTH, generator=drawn)
        self.y = torch.randint(WIDTH, shape, generator=drawn)

    def of(self, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return one micro-batch of one rank."""
        return self.x[step, micro, rank], self.y[step, micro, rank]


class Loop:
    """The plain loop: what all ranks compute, one after the other, with fp32 masters."""

    def __init__(self, how: Arithmetic, ranks: int) -> None:
        """Begin with the model's first weights."""
        self.how, self.ranks, self.dtype = how, ranks, _DTYPES[how.dtype]
        self.scale = 2.0**SCALE_POWER if how.dtype == "fp16" else 1.0
        self.model = Layers()
        self.masters = [p.detach().clone() for p in self.model.parameters()]
        self.states = [AdamState(torch.zeros_like(m), torch.zeros_like(m)) for m in self.masters]
        self.torchs = [m.clone().requires_grad_() for m in self.masters]
        self.torch_adamw = torch.optim.AdamW(self.torchs, lr=LR, weight_decay=DECAY, foreach=False)
        self.model.to(self.dtype)

    def train(self, rank: int, steps: int) -> Trained:
        """Take all steps; return also what ``rank`` of them computes."""
        data = Data(self.how.micro_batches, self.ranks, steps)
        losses, norms = [], []
        for step in range(steps):
            found: list[list[list[Tensor]]] = []
            for micro in range(self.how.micro_batches):
                passes = [self._backward(data.of(step, micro, r)) for r in range(self.ranks)]
                losses.append(passes[rank][0])
                found.append([gradients for _, gradients in passes])
            gradients = [
                self._reduced([[ranks[r][index] for ranks in found] for r in range(self.ranks)])
                for index in range(len(self.masters))
            ]
            norms.append(math.sqrt(sum(map(self._square, gradients))) / self.scale)
            clip = min(1.0, LIMIT / (norms[-1] + 1e-6)) if self.how.clips else 1.0
            self._update(step + 1, gradients, clip / self.scale)
        return Trained(losses, norms, self.masters, [p.detach() for p in self.model.parameters()])

    def _backward(self, batch: tuple[Tensor, Tensor]) -> tuple[float, list[Tensor]]:
        x, y = batch
        loss = self.model(x.to(self.dtype), y)
        scaled = loss / self.how.micro_batches * self.scale
        return loss.item(), list(torch.autograd.grad(scaled, list(self.model.parameters())))

    def _reduced(self, by_rank: list[list[Tensor]]) -> Tensor:
        """Sum micro-batches in fp32, and average ranks: in fp32 too where stages 0 and 1 sum."""
        if self.how.stage <= 1 and self.how.micro_batches > 1:
            by_rank = [[gradient.float() for gradient in micros] for micros in by_rank]
        if self.how.stage == 1:  # in the step's last backward alone
            return self._average([_sum(micros) for micros in by_rank])
        return _sum([self._average(list(ranks)) for ranks in zip(*by_rank, strict=True)])

    def _average(self, of_ranks: list[Tensor]) -> Tensor:
        if self.ranks == 1:
            return of_ranks[0]
        before = self.ranks if of_ranks[0].dtype == torch.float16 else 1  # a sum might overflow
        first, second = (gradient / before for gradient in of_ranks)
        return (first + second) / (self.ranks // before)

    def _square(self, gradient: Tensor) -> float:
        shards = self.ranks if self.how.stage else 1
        return sum(squared_norm_reference(rows) for rows in gradient.chunk(shards))

    @torch.no_grad()
    def _update(self, step: int, gradients: list[Tensor], factor: float) -> None:
        scalars = adam_scalars(
            lr=LR,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=DECAY,
            step=step,
            decoupled=True,
            grad_factor=factor,
        )
        for master, gradient, state in zip(self.masters, gradients, self.states, strict=True):
            adam_reference(master, gradient.float(), state, scalars)
        for parameter, gradient in zip(self.torchs, gradients, strict=True):
            parameter.grad = gradient.float() * factor
        self.torch_adamw.step()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            parameter.copy_(master)


def _sum(micros: list[Tensor]) -> Tensor:
    total = micros[0]
    for gradient in micros[1:]:
        total = total.float() + gradient
    return total


def engine_run(how: Arithmetic, zero: dict[str, Any], steps: int, folder: str) -> Trained:
    """Train a cell through the door, as a script does."""
    rank, dtype = dist.get_rank(), _DTYPES[how.dtype]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": how.micro_batches,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "gradient_clipping": LIMIT if how.clips else 0.0,
        "bf16": {"enabled": how.dtype == "bf16"},
        "fp16": {"enabled": how.dtype == "fp16", "initial_scale_power": SCALE_POWER},
    }
    engine, _, _, _ = deepspeed.initialize(model=Layers(), config=config)
    data = Data(how.micro_batches, dist.get_world_size(), steps)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(how.micro_batches):
            x, y = data.of(step, micro, rank)
            loss = engine(x.to(dtype), y)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    if (engine.global_steps, engine.skipped_steps) != (steps, 0):
        message = f"{engine.global_steps} steps, {engine.skipped_steps} of them skipped: {zero}"
        raise RuntimeError(message)
    masters = [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.parameters()]
    engine.save_16bit_model(folder, "weights.bin")
    dist.barrier()
    weights = list(torch.load(Path(folder, "weights.bin"), weights_only=True).values())
    engine.destroy()
    dist.barrier()
    return Trained(losses, norms, masters, weights)


def _differences(ours: Trained, loop: Trained) -> int:
    """Return how many values differ: losses, norms, masters and weights."""
    scalars = zip([*ours.losses, *ours.norms], [*loop.losses, *loop.norms], strict=True)
    tensors = zip([*ours.masters, *ours.weights], [*loop.masters, *loop.weights], strict=True)
    return sum(a != b for a, b in scalars) + sum(int((a != b).sum()) for a, b in tensors)


def run_cells(steps: int, folder: str) -> None:
    """Run every cell; print what differs, by dtype."""
    deepspeed.init_distributed(dist_backend="gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loops: dict[Arithmetic, tuple[Trained, list[Tensor]]] = {}
    found = {dtype: {"cells": 0, "differ": 0, "furthest": 0.0} for dtype in _DTYPES}
    for dtype, clips, micro_batches, stage, place in itertools.product(
        _DTYPES, (False, True), (1, 4), range(4), ("none", "cpu", "nvme")
    ):
        how = Arithmetic(dtype, clips, micro_batches, min(stage, 2))
        if how not in loops:
            loop = Loop(how, ranks)
            loops[how] = loop.train(rank, steps), [p.detach() for p in loop.torchs]
        zero: dict[str, Any] = {"stage": stage}
        offload = {"device": place, "nvme_path": folder}
        zero["offload_optimizer"] = offload
        if stage == 3:
            zero["offload_param"] = offload
        ours, (loop_run, of_torch) = engine_run(how, zero, steps, folder), loops[how]
        pairs = zip(ours.masters, of_torch, strict=True)
        measured = found[dtype]
        measured["cells"] += 1
        measured["differ"] += _differences(ours, loop_run)
        distance = max(float((a - b).abs().max()) for a, b in pairs)
        measured["furthest"] = max(measured["furthest"], distance)
    everywhere: list[Any] = [None] * ranks
    dist.all_gather_object(everywhere, found)
    if rank == 0:
        for dtype, measured in found.items():
            measured["differ"] = sum(each[dtype]["differ"] for each in everywhere)
        print(json.dumps(found))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    run_cells(int(sys.argv[1]), sys.argv[2])
