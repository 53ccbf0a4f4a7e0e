"""Training by classes other than Adam through ``deepspeed.initialize``, and the same in RAM."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tensorstow.deepspeed as deepspeed
from parity.problem import one_torch_thread
from ranks.twin import weights_of
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.ops.lion import Lion
from tensorstow.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
)

STEPS = 4
Gradients = list[torch.Tensor]


class Narrow(nn.Module):
    """Layers of which one is large enough for states on disk, also as a shard."""

    def __init__(self) -> None:
        """Make three layers and a scalar, the same at each call."""
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(6, 90), nn.Linear(90, 130), nn.Linear(130, 3)])
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale).square().mean()


@dataclass(frozen=True)
class Case:
    """A class, by its name in a configuration, and the rest of the configuration."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    stage: int = 0
    accumulation: int = 1
    clip: float = 0.0
    offload: dict[str, Any] = field(default_factory=dict)
    saves: bool = False
    """Whether the run is saved half way, and goes on in another engine."""

    def __str__(self) -> str:
        """Name what differs."""
        return f"{self.name}-z{self.stage}-acc{self.accumulation}-clip{self.clip}-{self.offload}"

    def config(self, world: int, folder: str) -> dict[str, Any]:
        """Return the configuration for ``world`` ranks."""
        offload = {k: {"device": v, "nvme_path": folder} for k, v in self.offload.items()}
        return {
            "train_batch_size": 2 * world * self.accumulation,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": self.name, "params": self.options},
            "zero_optimization": {"stage": self.stage, **offload},
        }

    def of_torch(self) -> Callable[..., torch.optim.Optimizer]:
        """Return what makes the plain optimizer."""
        kind = Lion if self.name == "Lion" else getattr(torch.optim, self.name)
        plain = {} if kind is Lion else {"foreach": False}
        return lambda params: kind(params, **{**self.options, **plain})


def batch_of(rank: int, step: int, micro: int) -> torch.Tensor:
    """Return what a rank sees."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    return torch.randn(2, 6, generator=generator)


def train(engine: deepspeed.DeepSpeedEngine, steps: range) -> None:
    """Take these steps."""
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(batch_of(dist.get_rank(), step, micro)))
            engine.step()


def through_engine(case: Case, folder: str) -> list[torch.Tensor]:
    """Train; return whole weights, and the norm of the last gradients."""
    config = case.config(dist.get_world_size(), folder)
    engine, optimizer, _, _ = deepspeed.initialize(model=Narrow(), config=config)
    assert optimizer.placement_of_states == ("disk" if case.offload else "host")
    begin = 0
    if case.saves:
        begin = STEPS // 2
        train(engine, range(begin))
        engine.save_checkpoint(folder, "half")
        engine.destroy()
        other = Narrow()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        engine, optimizer, _, _ = deepspeed.initialize(model=other, config=config)
        engine.load_checkpoint(folder, "half")
    train(engine, range(begin, STEPS))
    assert not case.offload or optimizer._memory().disk_bytes
    weights = weights_of(engine.module)
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return [*weights, torch.tensor(norm)]


@one_torch_thread()  # as ranks have: with others some processors' products have other bits
def in_ram(case: Case, world: int) -> list[torch.Tensor]:
    """Train the plain class in this process by what ``world`` ranks see."""
    model = Narrow()
    optimizer = case.of_torch()(model.parameters())
    norm = 0.0
    for step in range(STEPS):
        total = _summed(case, model, step, world)
        squares = [gradient.double().square().sum() for gradient in total]
        norm = torch.stack(squares).sum().sqrt().item()
        factor = min(1.0, case.clip / (norm + 1e-6)) if case.clip else 1.0
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient * factor
        optimizer.step()
    return [*weights_of(model), torch.tensor(norm)]


def _summed(case: Case, model: nn.Module, step: int, world: int) -> Gradients:
    """Return gradients over ranks and micro-batches, summed in the order that the stage has."""
    grid = [
        [_gradients(model, batch_of(rank, step, micro), case.accumulation) for rank in range(world)]
        for micro in range(case.accumulation)
    ]
    if case.stage == 1:
        return _mean([_sum(list(own)) for own in zip(*grid, strict=True)])
    return _sum([_mean(ranks) for ranks in grid])


def _gradients(model: nn.Module, batch: torch.Tensor, times: int) -> Gradients:
    return list(torch.autograd.grad(model(batch) / times, list(model.parameters())))


def _sum(each: list[Gradients]) -> Gradients:
    return [sum(rest, first) for first, *rest in zip(*each, strict=True)]


def _mean(each: list[Gradients]) -> Gradients:
    return [gradient / len(each) for gradient in _sum(each)]


def refused(case: Case, folder: str) -> str:
    """Return what is said of a configuration that cannot be."""
    config = case.config(dist.get_world_size(), folder)
    try:
        deepspeed.initialize(model=Narrow(), config=config)
    except OptionError as error:
        return str(error)
    return "nothing was said"


def loaded_elsewhere(case: Case, folder: str) -> list[torch.Tensor]:
    """Go on from the checkpoint of another number of ranks; return the states, whole."""
    config = case.config(dist.get_world_size(), folder)
    engine, *_ = deepspeed.initialize(model=Narrow(), config=config)
    engine.load_checkpoint(folder, "half")
    found = [safe_get_full_optimizer_state(p, "momentum_buffer") for p in engine.parameters()]
    engine.destroy()
    return found


def read_and_set(case: Case, folder: str) -> None:
    """Read weights and states by upstream's functions, and set one."""
    config = case.config(dist.get_world_size(), folder)
    engine, *_ = deepspeed.initialize(model=Narrow(), config=config)
    second = engine.module.layers[1].weight
    assert safe_get_full_optimizer_state(second, "momentum_buffer") is None
    train(engine, range(1))
    assert torch.equal(safe_get_full_fp32_param(second), weights_of(engine.module)[3])
    value = torch.arange(130 * 90.0).view(130, 90)
    safe_set_full_optimizer_state(second, value, "momentum_buffer")
    assert torch.equal(safe_get_full_optimizer_state(second, "momentum_buffer"), value)
    before = weights_of(engine.module)[3]
    train(engine, range(1, 2))
    assert not torch.equal(weights_of(engine.module)[3], before)
    assert engine.get_mom() == [0.5]
    engine.destroy()
