"""Training a model that FSDP2 has sharded, and the same alone: what tests compare."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tensorstow

WIDTH = 12
STEPS = 4


@dataclass(frozen=True)
class Training:
    """One way of training."""

    dtype: torch.dtype = torch.float32
    states: str = "ram"
    overlap: str = "none"
    clip: float | None = None
    micro_batches: int = 1


def model_of(dtype: torch.dtype) -> nn.Module:
    """Return the model, the same at each call: odd sizes, so that shards are uneven."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 1)).to(dtype)


def batch_of(rank: int, step: int, micro: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank computes on."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(4, WIDTH, generator=generator).to(dtype)


def sharded(training: Training) -> list[torch.Tensor]:
    """Train under FSDP2 with tensorstow's AdamW over its DTensors; return whole weights."""
    model = model_of(training.dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    steps = training.micro_batches if training.overlap == "backward" else 1
    optimizer = tensorstow.AdamW(
        model.parameters(),
        lr=1e-2,
        states=training.states,
        overlap=training.overlap,
        module=model,
        accumulation_steps=steps,
    )
    for step in range(STEPS):
        for micro in range(training.micro_batches):
            model(batch_of(dist.get_rank(), step, micro, training.dtype)).square().mean().backward()
        if training.clip is not None:
            optimizer.clip_grad_norm_(training.clip)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    optimizer.close()
    return [w.detach() for w in weights]


def alone(training: Training, world: int) -> list[torch.Tensor]:
    """Train in one process on what ``world`` ranks would see, everything in RAM."""
    model = model_of(training.dtype)
    optimizer = tensorstow.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        total: list[torch.Tensor] = []
        for micro in range(training.micro_batches):
            for rank in range(world):
                optimizer.zero_grad()
                model(batch_of(rank, step, micro, training.dtype)).square().mean().backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                if rank == 0:
                    reduced = grads
                else:
                    reduced = [a + b for a, b in zip(reduced, grads, strict=True)]
            reduced = [g / world for g in reduced]
            total = [a + b for a, b in zip(total, reduced, strict=True)] if total else reduced
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient
        if training.clip is not None:
            optimizer.clip_grad_norm_(training.clip)
        optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    return weights
