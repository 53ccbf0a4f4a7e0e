"""A small run whose snapshots are pushed, and what it has."""

from pathlib import Path

import torch

import tensorstow
from tensorstow.store.remote import Remote

Weights = list[torch.Tensor]


class Run:
    """A run of a small model: two trained layers, a frozen one, and a buffer."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64)]
        self.model = torch.nn.Sequential(*layers).to(torch.bfloat16)
        layers[2].requires_grad_(requires_grad=False)
        self.optimizer = tensorstow.AdamW(
            self.model.parameters(),
            states="disk",
            dir=directory,
            module=self.model,
            commit_every=None,
            extra=lambda: {"noise": torch.ones(3), "word": "said"},
        )

    def step(self) -> None:
        batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        self.model(batch.to(torch.bfloat16)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> Weights:
        self.optimizer.wait()
        states = self.optimizer.state_dict()["state"]
        values = [v.clone() for _, entry in sorted(states.items()) for v in entry.values()]
        return [*(v.clone() for v in self.model.state_dict().values()), *values]


def trained(directory: Path, *names: str) -> Weights:
    """Train a step before each snapshot; return what the last one has."""
    run = Run(directory)
    with run.optimizer:
        for name in names:
            run.step()
            run.optimizer.snapshot(name)
        return run.state()


def is_same(directory: Path, wanted: Weights, which: str | None = None) -> bool:
    run = Run(directory)
    with run.optimizer:
        assert run.optimizer.resume(which) is not None
        assert run.optimizer.extra["word"] == "said"
        return all(map(torch.equal, run.state(), wanted))


def names_in(url: str, folder: str = "objects") -> set[str]:
    return set(Remote(url).list(folder))
