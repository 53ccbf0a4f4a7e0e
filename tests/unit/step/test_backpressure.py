"""Backward waits for updates where more gradients than a window wait for theirs."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tensorstow.optim.adam import AdamW
from tensorstow.step import schedules
from tensorstow.step.backpressure import Backpressure

WIDTH = 512
NBYTES = WIDTH * WIDTH * 4


class Updated:
    """A pipeline that has updated what was waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def wait_parameters(self, numbers: list[int]) -> None:
        self.waited += numbers


class Of:
    """A chunk of these parameters."""

    def __init__(self, number: int, owners: list[int]) -> None:
        self.number, self.owners = number, owners


def test_the_oldest_that_can_be_is_waited_for() -> None:
    pipeline = Updated()
    pace = Backpressure(pipeline, [Of(0, [0, 1]), Of(1, [1]), Of(2, [2, 9])], [0, 1, 2])
    pace.landed(0)
    assert not pace.wait_for_one([0])  # 1 shares its chunk, and may still come
    pace.landed(2)
    assert pace.wait_for_one([0, 2])  # 9 is not due
    pace.landed(1)
    assert pace.wait_for_one([0, 1])
    assert pipeline.waited == [2, 0]


def trained(directory: Path, *, last: bool = True) -> AdamW:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12)]
    if not last:
        layers[3].unused = nn.Parameter(torch.ones(3))  # in a chunk with others
    model = nn.Sequential(*layers)
    optimizer = AdamW(
        model.parameters(),
        states="disk",
        dir=directory,
        durability="none",
        overlap="backward",
        module=model,
    )
    for _ in range(3):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.memory().gradient_bytes
    return optimizer


@pytest.mark.parametrize("last", [True, False])
def test_waiting_gradients_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, last: bool
) -> None:
    monkeypatch.setattr(schedules, "WINDOW_BYTES", 3 * NBYTES)
    optimizer = trained(tmp_path, last=last)
    # What waits for another's gradient stays: one chunk's worth.
    assert optimizer.memory().gradient_bytes <= (3 + 1 + (0 if last else 1)) * NBYTES
    optimizer.close()


def test_without_a_window_they_would_be_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "WINDOW_BYTES", 1 << 40)
    optimizer = trained(tmp_path)
    assert optimizer.memory().gradient_bytes > 4 * NBYTES
    optimizer.close()
