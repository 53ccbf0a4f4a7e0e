"""A model of equal blocks, each gathered by itself, stepped beside the next forward or not."""

from functools import partial
from typing import Literal

import torch

import tensorstow
from models import ResidualStack
from ranks.twin import weights_of
from tensorstow import AdamW, PipelinePolicy, Plan


def trained(
    overlap: Literal["none", "forward"], stage: Literal[2, 3], width: int
) -> list[torch.Tensor]:
    """Train with parameters on the device and a chunk or more for each block."""
    torch.manual_seed(0)
    plan = Plan(parameters="device", overlap=overlap, stage=stage)
    policy = PipelinePolicy(chunk_elements=1 << 12)
    model, optimizer = tensorstow.stow(
        ResidualStack(width, 4), partial(AdamW, lr=0.01, policy=policy), plan=plan
    )
    for step in range(5):
        device = next(model.parameters()).device
        x = torch.full((4, width), (step + 1) * 0.1, device=device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    kept = [weight.cpu() for weight in weights_of(model)]
    optimizer.close()
    return kept
