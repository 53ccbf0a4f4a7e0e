"""One parameter pulled to zero, its states on disk in six chunks: the least that can go wrong."""

import errno
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from parity.piecewise import CHUNK as PIECE_ELEMENTS
from tensorstow import AdamW, PipelinePolicy, StowedOptimizer, _native
from tensorstow.io.engine import BACKENDS, probe_backend
from tensorstow.states.layout import Family, slot_bytes

CHUNK = 4096
STREAM = 4 * CHUNK  # bytes
CHUNKS = 6
ELEMENTS = CHUNKS * CHUNK
SLOT = slot_bytes(Family(torch.float32, amsgrad=False), CHUNK, with_weights=False)
PIECE = 8 * PIECE_ELEMENTS  # two states in fp32
PIECES = 6

every_error = pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
every_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=pytest.mark.skipif(probe_backend(name) is not None, reason=name))
        for name in BACKENDS
    ],
)


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


class PiecewiseTraining:
    """One parameter pulled to zero by a stowed Adam; one step is taken."""

    def __init__(self, directory: Path, backend: str = "threads", pieces: int = PIECES) -> None:
        self.parameter = torch.nn.Parameter(torch.linspace(-1, 1, PIECES * PIECE_ELEMENTS))
        self.optimizer = StowedOptimizer(
            torch.optim.Adam,
            [self.parameter],
            states="disk",
            dir=directory,
            ram_budget=pieces * PIECE,
            policy=PipelinePolicy(chunk_elements=PIECE_ELEMENTS, backend=backend),  # type: ignore[arg-type]
        )
        self.step()
        self.optimizer.synchronize()

    @property
    def engine(self) -> _native.Engine:
        engine = self.optimizer._manager.engine
        assert engine is not None
        return engine

    def step(self) -> None:
        self.parameter.grad = 2 * self.parameter.detach()
        self.optimizer.step()


def piecewise_undisturbed(steps: int) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, PIECES * PIECE_ELEMENTS))
    optimizer = torch.optim.Adam([parameter], foreach=False)
    for _ in range(steps):
        parameter.grad = 2 * parameter.detach()
        optimizer.step()
    return parameter.detach()
