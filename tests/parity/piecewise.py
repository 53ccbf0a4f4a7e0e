"""Two models alike, one trained by an optimizer class and one by the same class, stowed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tensorstow import PipelinePolicy, StowedOptimizer

CHUNK = 16384
SMALL = PipelinePolicy(chunk_elements=CHUNK)
MATRICES = ((300, 400), (129, 517), (8, 8), (1031, 97))
SHAPES = (*MATRICES, (70_001,), (5,), ())
"""Sizes that are whole vectors and that are not, per thread and in all; two stay in RAM."""


@dataclass
class Pair:
    ours: StowedOptimizer
    theirs: torch.optim.Optimizer

    def parameters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(*(_parameters(o) for o in (self.ours, self.theirs)), strict=True))

    def give_gradients(self, seed: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for mine, other in self.parameters():
            gradient = torch.randn(mine.shape, generator=generator) * scale
            mine.grad = gradient.to(mine.dtype)
            other.grad = mine.grad.clone()

    def step(self, steps: int, first: int = 0) -> None:
        for seed in range(first, first + steps):
            self.give_gradients(seed, 10 ** -(seed % 3))
            self.ours.step()
            self.theirs.step()

    def assert_same(self) -> None:
        for mine, other in self.parameters():
            assert same_bits(mine, other)
        assert_same_states(self.ours.state_dict(), self.theirs.state_dict())


def pair(
    directory: Path,
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any] | None = None,
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    groups: Callable[[list[torch.nn.Parameter]], Any] = list,
    **stowing: Any,  # noqa: ANN401
) -> Pair:
    options = dict(options or {})
    mine, others = (parameters(shapes, dtype) for _ in range(2))
    stowing = {"states": "disk", "dir": directory, "policy": SMALL, **stowing}
    ours = StowedOptimizer(optimizer_class, groups(mine), **stowing, **options)
    theirs = optimizer_class(groups(others), **options)
    for group in theirs.param_groups:
        group.update({name: False for name in ("foreach", "fused") if name in group})
    return Pair(ours, theirs)


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def assert_same_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        mine = ours["state"][index]
        if not isinstance(entry, dict):  # under a key of the class's own
            assert same_value(mine, entry)
            continue
        assert mine.keys() == entry.keys()
        for name, value in entry.items():
            assert same_value(mine[name], value), (index, name)


def same_value(a: object, b: object) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return a == b


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
