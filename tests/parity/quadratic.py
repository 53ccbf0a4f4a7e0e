"""One parameter pulled to zero, its states on disk in six chunks: the least that can go wrong."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tensorstow import AdamW, PipelinePolicy, _native
from tensorstow.states.layout import Family, slot_bytes

CHUNK = 4096
STREAM = 4 * CHUNK  # bytes
CHUNKS = 6
ELEMENTS = CHUNKS * CHUNK
SLOT = slot_bytes(Family(torch.float32, amsgrad=False), CHUNK, with_weights=False)


@dataclass
class Training:
    parameter: torch.nn.Parameter
    optimizer: AdamW

    @property
    def engine(self) -> _native.Engine:
        engine = self.optimizer._states().engine
        assert engine is not None
        return engine

    def backward(self) -> None:
        self.parameter.grad = None
        torch.autograd.backward((self.parameter * self.parameter).sum())

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


def training_on(
    directory: Path, backend: str | None = None, ram_budget: int | None = None
) -> Training:
    """Return a training with states on disk after one step."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, ELEMENTS))
    policy = PipelinePolicy(chunk_elements=CHUNK, backend=backend)  # type: ignore[arg-type]
    optimizer = AdamW(
        [parameter],
        states="disk",
        dir=directory,
        durability="none",
        policy=policy,
        ram_budget=ram_budget,
    )
    training = Training(parameter, optimizer)
    training.step()
    optimizer.synchronize()
    return training


def undisturbed(steps: int) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, ELEMENTS))
    training = Training(parameter, AdamW([parameter]))
    for _ in range(steps):
        training.step()
    return parameter.detach()
