"""What ranks do with a booster."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import Plugin


def model_of() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for p in model.parameters()
    ]


def losses_on_all(
    plugin: type[Plugin],
    given: dict[str, Any],
    mesh: bool = False,  # noqa: FBT001, FBT002  # sent to the ranks by position
    unsynced: bool = False,  # noqa: FBT001, FBT002
    micro_batches: int = 1,
) -> Any:  # noqa: ANN401
    """Train, and return this rank's losses; or the shape of the mesh that parameters are on.

    ``unsynced``: there are two micro-batches, of which the first is not reduced.
    """
    rank = torch.distributed.get_rank()
    booster = Booster(plugin=plugin(**given))
    model = model_of()
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
    parts = 2 if unsynced else micro_batches
    losses = []
    for step in range(3):
        for part in range(parts):
            first = unsynced and part == 0
            with booster.no_sync(model, optimizer) if first else nullcontext():
                loss = model(batch(step, rank + 100 * part)).square().mean()
                booster.backward(loss, optimizer)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    shape: Any = None
    if mesh:
        (parameter, *_) = model.parameters()
        shape = tuple(parameter.device_mesh.shape)
    optimizer.zero_grad()
    if hasattr(optimizer.unwrap(), "close"):
        optimizer.unwrap().close()
    return shape if mesh else losses
