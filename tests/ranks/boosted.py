"""What ranks do with a booster."""

from contextlib import nullcontext
from pathlib import Path
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


def goes_on(plugin: type[Plugin], given: dict[str, Any], folder: str, shard: bool) -> bool:  # noqa: FBT001
    """Save a run, go on, load it into another, go on alike; return whether both are equal."""
    rank = torch.distributed.get_rank()
    booster = Booster(plugin=plugin(**given))

    def boosted(seed: int) -> tuple[nn.Module, Any]:
        model = model_of()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed)
        placed, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
        return placed, optimizer

    def train(model: nn.Module, optimizer: Any, steps: range) -> None:  # noqa: ANN401
        for step in steps:
            booster.backward(model(batch(step, rank)).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = boosted(0)
    train(model, optimizer, range(2))
    booster.save_model(model, Path(folder) / "m", shard=shard)
    booster.save_optimizer(optimizer, Path(folder) / "o", shard=shard)
    train(model, optimizer, range(2, 4))
    again, other = boosted(1)
    booster.load_model(again, Path(folder) / "m")
    booster.load_optimizer(other, Path(folder) / "o")
    train(again, other, range(2, 4))
    equal = all(map(torch.equal, whole(again), whole(model)))
    optimizer.close()
    other.close()
    return equal
