"""A model of equal blocks, each gathered by itself, stepped beside the next forward or not."""

from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import tensorstow
from tensorstow import AdamW, PipelinePolicy, Plan


class Residual(nn.Module):
    """Blocks in a row, each added to what comes in."""

    def __init__(self, width: int) -> None:
        """Make four of ``width``."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def trained(
    overlap: Literal["none", "forward"], stage: Literal[2, 3], width: int
) -> list[torch.Tensor]:
    """Train with parameters on the device and a chunk or more for each block."""
    torch.manual_seed(0)
    plan = Plan(parameters="device", overlap=overlap, stage=stage)
    policy = PipelinePolicy(chunk_elements=1 << 12)
    model, optimizer = tensorstow.stow(
        Residual(width), partial(AdamW, lr=0.01, policy=policy), plan=plan
    )
    for step in range(5):
        device = next(model.parameters()).device
        model(torch.full((4, width), (step + 1) * 0.1, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    kept = [weight.detach().cpu().clone() for weight in weights]
    optimizer.close()
    return kept
