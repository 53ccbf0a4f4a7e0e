"""Training a model through ``stow``, and the same in one process with everything in RAM."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import tensorstow
from ranks.twin import Twins, mesh_here, weights_of
from tensorstow import Plan, offload_activations
from tensorstow.activations import offload as saved_tensors
from tensorstow.fsdp.h2d_prefetch import h2d_prefetcher_of
from tensorstow.fsdp.placed_activations import PlacedActivations
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.sharding import current_device
from tensorstow.losses import chunked_cross_entropy
from tensorstow.nn import TiledLinear

CPU = torch.device("cpu")
WIDTH = 12
STEPS = 3
FROZEN = ("blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.up.bias", "blocks.1.down.weight")
"""A part of one unit, and all of another."""

Resume = Literal["none", "asked", "due"]


@dataclass(frozen=True)
class RunConfig:
    """One way of training."""

    plan: Plan = field(default_factory=Plan)
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    clip: float | None = None
    torch_clips: bool = False
    frozen: bool = False
    """Some parameters are not trained."""
    tied: bool = True
    """The head is the embedding."""
    resume: Resume = "none"
    """The run ends and goes on from a commit: one asked for, with a step behind it that is lost, or
    one that was due."""
    offloads_all: bool = False
    """What the whole model saves goes to disk, by ``offload_activations``, not by the plan."""
    in_parts: bool = False
    """One layer is tiles, and the loss is computed in chunks."""
    whole: bool = False
    """Gradients are whole numbers, the same in any order of summation: for more than two ranks."""

    def __str__(self) -> str:
        """Name what differs from the default."""
        p = self.plan
        parts = [f"z{p.stage}", p.parameters, *(f"{n}={t}" for n, t in p.parameter_units.items())]
        parts += [p.states, p.overlap, f"acc{p.accumulation_steps}"]
        parts += [f"vertical{p.micro_batches}" * (p.micro_batches > 1)]
        parts += [
            f"on-{p.update_on}" if p.update_on else "",
            "stay" * (p.device_budget is not None),
        ]
        parts += [str(self.dtype)[6:], str(self.compute_dtype)[6:] if self.compute_dtype else ""]
        parts += [f"x{p.replicas}", "clip" * (self.clip is not None), "torch" * self.torch_clips]
        parts += [
            "frozen" * self.frozen,
            "untied" * (not self.tied),
            self.resume.removeprefix("none"),
            f"saved-{p.activations}" * (p.activations != "keep"),
            "saved-all-disk" * self.offloads_all,
            "in-parts" * self.in_parts,
            "whole" * self.whole,
        ]
        return "-".join(p for p in parts if p)


class InFours(torch.autograd.Function):
    """A weight as it is, whose gradient is one of few multiples of four.

    Any sum of several ranks' and micro-batches' is exact in 16 bits, in any order, and so is the
    mean of four ranks.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # torch's own
        """Return the weight."""
        del ctx
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Round."""
        del ctx
        return 4 * (40 * gradient).round().clamp(-8, 8)


class Block(nn.Module):
    """A block of odd sizes, so that shards are uneven."""

    def __init__(self) -> None:
        """Make two layers."""
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.whole = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the stream."""
        if not self.whole:
            return x + self.down(torch.tanh(self.up(x)))
        up, bias, down = map(InFours.apply, (self.up.weight, self.up.bias, self.down.weight))
        return x + functional.linear(torch.tanh(functional.linear(x, up, bias)), down)


class Model(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        """Make three blocks."""
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.whole = self.in_parts = False

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits; with labels the loss, in chunks of two rows."""
        tied = InFours.apply(self.embedding.weight) if self.whole else None
        x = self.embedding(tokens) if tied is None else functional.embedding(tokens, tied)
        for block in self.blocks:
            x = block(x)
        if labels is not None:
            return chunked_cross_entropy(x, self.head.weight, labels, chunk_bytes="88B")
        return self.head(x) if tied is None else functional.linear(x, tied)


def model_of(dtype: torch.dtype) -> Model:
    """Return the model, the same at each call."""
    torch.manual_seed(3)
    return Model().to(dtype)


def model_for(config: RunConfig) -> Model:
    """Return the model as the config trains it."""
    model = model_of(config.dtype)
    for module in model.modules():
        if isinstance(module, Model | Block):
            module.whole = config.whole
    if not config.tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().flip(0).clone())
    if config.in_parts:
        first = model.blocks[0]
        sizes = first.up.in_features, first.up.out_features
        first.up = TiledLinear(*sizes, out_splits=2, init_linear=first.up, dtype=config.dtype)
        model.in_parts = True
    for name in FROZEN if config.frozen else ():
        model.get_parameter(name).requires_grad = False
    return model


def loss_of(
    model: nn.Module,
    rank: int,
    step: int,
    micro: int = 0,
    device: torch.device | None = None,
    count: int = 1,
) -> torch.Tensor:
    """Return the loss of what a rank sees, on ``device``, in ``count`` micro-batches at once."""
    seeds = (1000 * rank + 10 * step + micro + i for i in range(count))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    tokens = torch.cat([torch.randint(11, (2, 5), generator=each) for each in generators])
    if device is not None and device.type != "cpu":
        # From pageable memory the host would wait for the device, and hide who else is to.
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    if getattr(model, "in_parts", False):
        return model(tokens[:, :-1], tokens[:, 1:])
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def twins(plan: Plan, dtype: torch.dtype = torch.float32, **options: Any) -> Twins:  # noqa: ANN401
    """Return the small model, stowed by a plan, and the same that is whole."""
    return Twins(lambda: model_of(dtype), loss_of, plan, **options)


def groups_of(named: list[tuple[str, torch.Tensor]], **placement: object) -> tensorstow.AdamW:
    """Make an optimizer with two groups, as a user's code does."""
    decayed = [(n, p) for n, p in named if p.ndim > 1]
    rest = [(n, p) for n, p in named if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return tensorstow.AdamW(groups, lr=1e-2, **placement)


class StowedRun:
    """A process's part of a config, until it ends."""

    def __init__(self, config: RunConfig, directory: Path | None = None) -> None:
        """Place the model; ``directory``: for commits."""
        self.config = config
        due = {"commit_every": 2 if config.resume == "due" else None} if directory else {}
        self.model, self.optimizer = tensorstow.stow(
            model_for(config),
            partial(groups_of, **due),
            plan=config.plan,
            compute_dtype=config.compute_dtype,
            mesh=mesh_here(),
            dir=directory,
        )
        prefetcher = h2d_prefetcher_of(self.model)
        if prefetcher is not None and prefetcher.cache is not None:
            prefetcher.cache.assume(0)  # copies stay at once, and not behind two steps

    def train(self, *steps: int) -> None:
        """Take these steps; what forward saves of this model is all small."""
        all_saved: Any = nullcontext()
        if self.config.offloads_all:
            all_saved = offload_activations(self.model, to="disk", ram_budget=0)
        with patch.object(saved_tensors, "LEAST_BYTES", 0), all_saved as offload:
            self._train(*steps)
            if offload is not None:
                assert offload._pool.nbytes().bytes_written
        for part in self.optimizer._parts():
            if isinstance(part, PlacedActivations) and self.config.plan.activations != "recompute":
                (moved,) = part.nbytes()
                assert moved.bytes_down or current_device().type == "cpu"
                assert moved.bytes_written or self.config.plan.activations == "host"

    def _train(self, *steps: int) -> None:
        config, model, optimizer = self.config, self.model, self.optimizer
        for step in steps:
            count = config.plan.micro_batches
            for micro in range(0, config.plan.accumulation_steps * count, count):
                loss_of(model, dist.get_rank(), step, micro, current_device(), count).backward()
            if config.clip is not None and config.torch_clips:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            elif config.clip is not None:
                optimizer.clip_grad_norm_(config.clip)
            optimizer.step()
            optimizer.zero_grad()
            if config.plan.device_budget is not None:
                assert parameter_bytes(model).device_cache_bytes > 0


def stowed(config: RunConfig, directory: Path | None = None) -> list[torch.Tensor]:
    """Train through ``stow``; return whole weights. A config that resumes takes a ``directory``."""
    if config.resume == "none":
        run, begin = StowedRun(config), 0
    else:
        assert directory is not None
        run, begin = resumed(config, directory)
    run.train(*range(begin, STEPS))
    return finish(run.model, run.optimizer)


def resumed(config: RunConfig, directory: Path) -> tuple[StowedRun, int]:
    """Train until there is a commit, and throw everything away; return who goes on, and where."""
    run = StowedRun(config, directory)
    run.train(0)
    if config.resume == "asked":
        run.optimizer.commit()
    run.train(1)  # one that asks for its commit loses this
    run.optimizer.close()
    run = StowedRun(config, directory)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()  # what is right from now on comes from the commit
    begin = run.optimizer.resume()
    assert begin == (1 if config.resume == "asked" else 2)
    return run, begin


def finish(model: nn.Module, optimizer: tensorstow.AdamW) -> list[torch.Tensor]:
    """Return whole weights; end the optimizer."""
    optimizer.wait()
    weights = [weight.cpu() for weight in weights_of(model)]
    optimizer.close()
    return weights


def alone(config: RunConfig, world: int, device: torch.device = CPU) -> list[torch.Tensor]:
    """Train in this process on what ``world`` ranks would see, everything in RAM.

    ``device``: what computes gradients.
    """
    master = model_for(config)
    optimizer = groups_of(list(master.named_parameters()))
    trained = [p for p in master.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad_dtype = None
    for step in range(STEPS):
        summed = _summed(config, master, step, world, device)
        for parameter, gradient in zip(trained, summed, strict=True):
            parameter.grad = gradient
        if config.clip is not None:
            optimizer.clip_grad_norm_(config.clip)
        optimizer.step()
        optimizer.zero_grad()
    return finish(master, optimizer)


def _summed(
    config: RunConfig, master: nn.Module, step: int, world: int, device: torch.device
) -> list[torch.Tensor]:
    """Return gradients over ranks and micro-batches, summed in the order that the stage has."""
    working = model_for(config)
    working.load_state_dict(master.state_dict())
    working.to(device, config.compute_dtype or config.dtype)
    steps, count = config.plan.accumulation_steps, config.plan.micro_batches
    at_once = config.plan.stage != 1
    total: list[torch.Tensor] = []
    if count > 1:  # each rank sums in fp32, and that is reduced
        for first in range(0, steps * count, count):
            each = [_in_order(config, working, (r, step, first), device) for r in range(world)]
            total = _plus(total, _mean(each, torch.float32), wide=True)
        return total
    if at_once:
        for micro in range(steps):
            each = [_gradients(config, working, (r, step, micro), device) for r in range(world)]
            # Under stage 0 no_sync() may be called: reduced in fp32, in which the average stays.
            is_wide = config.plan.stage == 0 and steps > 1
            if is_wide:
                each = [[gradient.float() for gradient in one] for one in each]
            total = _plus(total, _mean(each, torch.float32 if is_wide else config.dtype), wide=True)
        return total
    sums = []
    for rank in range(world):
        own: list[torch.Tensor] = []
        for micro in range(steps):
            own = _plus(own, _gradients(config, working, (rank, step, micro), device), wide=True)
        sums.append(own)
    return _mean(sums, torch.float32 if steps > 1 else config.dtype)


def _in_order(
    config: RunConfig, working: nn.Module, first: tuple[int, int, int], device: torch.device
) -> list[torch.Tensor]:
    """Return what one rank sums of the micro-batches of one batch."""
    rank, step, micro = first
    total: list[torch.Tensor] = []
    for i in range(config.plan.micro_batches):
        each = _gradients(config, working, (rank, step, micro + i), device)
        total = _plus(total, each, wide=True)
    return total


def _gradients(
    config: RunConfig, working: nn.Module, batch: tuple[int, int, int], device: torch.device
) -> list[torch.Tensor]:
    """Return those of the parameters that are trained, which come from the device at once."""
    working.zero_grad()
    (loss_of(working, *batch, device) / config.plan.micro_batches).backward()
    gradients = [p.grad for p in working.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]).cpu()
    parts = flat.split([gradient.numel() for gradient in gradients])
    return [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)]


def _plus(a: list[torch.Tensor], b: list[torch.Tensor], *, wide: bool) -> list[torch.Tensor]:
    if not a:
        return b
    return [(x.float() if wide else x) + y for x, y in zip(a, b, strict=True)]


def _mean(each: list[list[torch.Tensor]], dtype: torch.dtype) -> list[torch.Tensor]:
    total = each[0]
    for more in each[1:]:
        total = [x + y for x, y in zip(total, more, strict=True)]
    return [(x / len(each)).to(dtype) for x in total]


def incomplete() -> str:
    """Step after one of two micro-batches under stage 1; return what is said."""
    mesh = init_device_mesh("cpu", (1,))
    plan = Plan(stage=1, accumulation_steps=2)
    model, optimizer = tensorstow.stow(model_of(torch.float32), groups_of, plan=plan, mesh=mesh)
    loss_of(model, 0, 0, 0).backward()
    try:
        optimizer.step()
    except tensorstow.StowError as error:
        return str(error)
    return "nothing was said"
