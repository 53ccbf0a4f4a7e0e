"""Training a model that FSDP2 has sharded, and the same alone: what tests compare."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tensorstow
from tensorstow.fsdp.fp32_sums import widen_gradient

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
    nan_until_published: bool = False
    """Weights are NaN until they are published."""
    listed: bool = False
    """Layers are sharded as one group instead of one by one."""
    looked_at: bool = False
    """Forward runs without backward before the first step, which leaves the root gathered."""
    halved: bool = False
    """Somebody halves all weights in the middle of it, by the parameters that users know."""


class Scale(nn.Module):
    """A block that no group of its own is made of: it is gathered with the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return x * self.scale


def model_of(dtype: torch.dtype) -> nn.Module:
    """Return the model, the same at each call: odd sizes, so that shards are uneven."""
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, 7), Scale(), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 1)]
    return nn.Sequential(*layers).to(dtype)


def batch_of(rank: int, step: int, micro: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank computes on."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(4, WIDTH, generator=generator).to(dtype)


@torch.no_grad()
def halve(model: nn.Module, optimizer: tensorstow.AdamW) -> None:
    """Halve all weights in place."""
    optimizer.wait()
    for parameter in model.parameters():
        parameter.mul_(0.5)


def sharded(training: Training) -> list[torch.Tensor]:
    """Train under FSDP2 with tensorstow's AdamW over its DTensors; return whole weights."""
    model = model_of(training.dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for unit in [layers] if training.listed else layers:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)  # what is in no layer is gathered with the root
    steps = training.micro_batches if training.overlap == "backward" else 1
    optimizer = tensorstow.AdamW(
        model.parameters(),
        lr=1e-2,
        states=training.states,
        overlap=training.overlap,
        module=model,
        accumulation_steps=steps,
        policy=tensorstow.PipelinePolicy(nan_until_published=training.nan_until_published),
    )
    with torch.no_grad():
        for _ in range(2 if training.looked_at else 0):
            model(batch_of(0, 0, 0, training.dtype))
    for step in range(STEPS):
        if training.halved and step == STEPS // 2:
            halve(model, optimizer)
        for micro in range(training.micro_batches):
            model(batch_of(dist.get_rank(), step, micro, training.dtype)).square().mean().backward()
        if training.clip is not None:
            optimizer.clip_grad_norm_(training.clip)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    weights = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    optimizer.close()
    return [w.detach() for w in weights]


def alone(training: Training, world: int) -> list[torch.Tensor]:
    """Train in one process on what ``world`` ranks would see, everything in RAM."""
    model = model_of(training.dtype)
    optimizer = tensorstow.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        if training.halved and step == STEPS // 2:
            halve(model, optimizer)
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


def widened(micro_batches: int) -> list[torch.Tensor]:
    """Sum bf16 gradients of a parameter that FSDP2 has sharded; return the whole sum."""
    model = nn.Linear(WIDTH, 1, bias=False).to(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.weight.register_post_accumulate_grad_hook(widen_gradient)
    for micro in range(micro_batches):
        factor = 256.0 if micro == 0 else 1.0  # a bf16 sum would lose what follows
        (factor * model(torch.ones(1, WIDTH, dtype=torch.bfloat16))).sum().backward()
    return [model.weight.grad.full_tensor()]
