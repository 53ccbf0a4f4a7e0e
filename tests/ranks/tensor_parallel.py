"""Tensor parallelism, alone and under FSDP2, beside the same model in one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tensorstow
from ranks.twin import weights_of, whole
from tensorstow.tensors.dtensor import anywhere, part_of

WIDTH = 8
STEPS = 3

Trained = tuple[list[float], list[torch.Tensor]]
"""The norm of each step's gradients, and the weights behind the last step."""


class Block(nn.Module):
    """A norm with a gradient that is a sum over ranks, and two matrices that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.down(self.up(self.norm(x)).relu())


PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(),
}


def alone() -> Trained:
    """Train in one process."""
    return _train(model_alone())


def parallel(data: int) -> Trained:
    """Train on all ranks: FSDP2 over ``data`` of them, tensor parallelism over the others."""
    model = parallel_model(data)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(part_of(whole(parameter), parameter, "it"), parameter.to_local())
    for rank in range(dist.get_world_size()):
        assert anywhere(list(model.parameters()), on_this_rank=dist.get_rank() == rank)
    assert not anywhere(list(model.parameters()), on_this_rank=False)
    return _train(model)


def parallel_model(data: int) -> nn.Module:
    """Return the model in pieces, as ``parallel`` trains it."""
    tensor = dist.get_world_size() // data
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    model = model_alone()
    for block in model:
        parallelize_module(block, mesh["tensor"], PLAN)
        parallelize_module(
            block,
            mesh["tensor"],
            PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        )
        if data > 1:
            fully_shard(block, mesh=mesh["data"])
    return model


def model_alone() -> nn.Module:
    """Return the model in one piece."""
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block())


def _train(model: nn.Module) -> Trained:
    optimizer = tensorstow.AdamW(model.parameters(), lr=1e-2, states="disk")
    norms = []
    for step in range(STEPS):
        batch = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step))
        (100.0 * model(batch).square().mean()).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    weights = weights_of(model)
    optimizer.close()
    return norms, weights
