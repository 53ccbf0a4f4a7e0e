"""Training with updates beside forward or backward, on a disk that can be made slow."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensorstow import AdamW, PipelinePolicy, _native
from tensorstow.base.update_on import Overlap

CHUNK = 1024
POISONED = PipelinePolicy(
    chunk_elements=CHUNK, backend="threads", depth=1, nan_until_published=True
)
DELAY_S = 0.02

Loss = Callable[[nn.Module, int], Tensor]
PLAIN = PipelinePolicy(chunk_elements=CHUNK, backend="threads", depth=1)
NEVER, ALWAYS = 1e9, 1e-3
"""Norms that clip no step, and every step."""
SCHEDULES = {
    "never": [NEVER] * 7,
    "always": [ALWAYS] * 7,
    "in turns": [NEVER, ALWAYS] * 3 + [NEVER],
    "at first": [ALWAYS] * 3 + [NEVER] * 4,
    "at last": [NEVER] * 4 + [ALWAYS] * 3,
}
"""Norms of seven steps."""


def blocks(width: int = 32, depth: int = 3) -> nn.Sequential:
    """Return a model whose blocks have a chunk of states each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def mean_square(model: nn.Module, step: int, width: int = 32) -> Tensor:
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(x).square().mean()
    return loss


def optimizer_for(
    model: nn.Module,
    directory: Path,
    overlap: Overlap,
    **given: Any,  # noqa: ANN401  # passed on
) -> AdamW:
    """Return an optimizer with states on disk and weights that are NaN until they are new."""
    return AdamW(
        given.pop("params", model.parameters()),
        lr=1e-2,
        states="disk",
        dir=directory,
        overlap=overlap,
        module=model,
        durability=given.pop("durability", "none"),
        policy=given.pop("policy", POISONED),
        **given,
    )


def engine_of(optimizer: AdamW) -> _native.Engine:
    engine = optimizer._states().engine
    assert engine is not None
    return engine


def slow(optimizer: AdamW, operation: str = "read", seconds: float = DELAY_S) -> None:
    """Let every transfer of the optimizer's states take ``seconds`` from now on."""
    engine = engine_of(optimizer)
    optimizer.synchronize()
    engine.inject_fault(operation, times=-1, delay_us=round(seconds * 1e6))


def train(
    optimizer: AdamW, model: nn.Module, steps: Iterable[int], loss: Loss = mean_square
) -> None:
    for step in steps:
        optimizer.zero_grad()
        torch.autograd.backward(loss(model, step))
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return what is there now, waited for or not."""
    with torch._C.DisableTorchFunctionSubclass():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def in_ram(model: nn.Module, steps: Iterable[int], loss: Loss = mean_square) -> dict[str, Tensor]:
    """Train ``model`` with nothing beside anything; return its weights."""
    train(AdamW(model.parameters(), lr=1e-2), model, steps, loss)
    return weights(model)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def states_of(optimizer: AdamW) -> list[Tensor]:
    """Return copies of all states, in one order."""
    entries = optimizer.state_dict()["state"].values()
    return [torch.as_tensor(value).clone() for entry in entries for value in entry.values()]
