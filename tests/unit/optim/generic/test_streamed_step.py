"""What moves while pieces are stepped: the next ones are read ahead, unless it is done naively."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn, optim

from tensorstow.optim.generic.piece_step import Job
from tensorstow.optim.generic.pieces import Piece
from tensorstow.optim.generic.state_manager import StateManager
from tensorstow.optim.generic.stepper import Stepper
from tensorstow.optim.generic.transfers import Transfers
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement

LARGE = 40_000


def events_of_a_second_step(
    directory: Path, schedule: Literal["pipelined", "naive"], patch: pytest.MonkeyPatch
) -> list[str]:
    """Return which of three pieces was requested ahead, read or waited for, in order."""
    params = [nn.Parameter(torch.zeros(LARGE)) for _ in range(3)]
    stepper = Stepper(optim.SGD, [{"params": params}], {"momentum": 0.5, "lr": 1.0})
    policy = PipelinePolicy(schedule=schedule)
    manager = StateManager(stepper, Placement(1.0, (directory,), None), policy, elementwise=False)
    groups = [{**stepper.group_options[0], "params": params}]
    manager.attach([(groups[0], p) for p in params])
    jobs = [Job(groups[0], param, {}, param.parameter) for param in manager.params()]
    for parameter in params:
        parameter.grad = torch.ones(LARGE)
    manager.step(jobs, groups, {})
    manager.wait_written()
    pieces = [param.pieces[0] for param in manager.params()]
    events: list[str] = []
    read, read_ahead, wait_written = Transfers.read, Transfers.read_ahead, Transfers.wait_written

    def reads(self: Transfers, piece: Piece) -> torch.Tensor:
        events.append(f"read {pieces.index(piece)}")
        return read(self, piece)

    def reads_ahead(self: Transfers, piece: Piece) -> bool:
        if not events[-1:] or not events[-1].startswith("read "):  # read() asks for it too
            events.append(f"ahead {pieces.index(piece)}")
        return read_ahead(self, piece)

    def waits(self: Transfers) -> None:
        events.append("wait_written")
        wait_written(self)

    patch.setattr(Transfers, "read", reads)
    patch.setattr(Transfers, "read_ahead", reads_ahead)
    patch.setattr(Transfers, "wait_written", waits)
    manager.step(jobs, groups, {})
    assert all((manager.read(param)["momentum_buffer"] == 1.5).all() for param in manager.params())
    return events


def test_pieces_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of_a_second_step(tmp_path, "pipelined", monkeypatch)
    assert events[:4] == ["ahead 0", "ahead 1", "ahead 2", "read 0"]
    assert "wait_written" not in events


def test_naively_each_piece_is_on_disk_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = events_of_a_second_step(tmp_path, "naive", monkeypatch)
    assert events[:6] == [
        "read 0",
        "wait_written",
        "read 1",
        "wait_written",
        "read 2",
        "wait_written",
    ]
