"""State dicts that name a snapshot: what they hold, and that runs go on from them bit for bit."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranks.durable import with_tickets
from ranks.pool import Ranks
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.ticket import KEY, snapshot_named_by

SMALL = PipelinePolicy(chunk_elements=4096)


class Run:
    """A model with a buffer, an optimizer with tickets, and a schedule of its learning rate."""

    def __init__(self, directory: Path | None, **given: Any) -> None:  # noqa: ANN401
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
        if directory is not None:
            given = {"dir": directory, "states": "disk", "checkpoints": "ticket", **given}
        self.optimizer = AdamW(
            self.model.parameters(), lr=1e-2, module=self.model, policy=SMALL, **given
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.5**n)

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            self.model(torch.randn(5, 6, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        return file.getvalue()

    def load(self, ticket: bytes) -> None:
        self.optimizer.load_state_dict(torch.load(io.BytesIO(ticket), weights_only=True))

    def bits(self) -> list[bytes]:
        return [t.numpy().tobytes() for t in self.model.state_dict().values()]


def undisturbed(steps: int) -> list[bytes]:
    run = Run(None)
    run.train(range(steps))
    return run.bits()


@pytest.mark.parametrize("given", [{}, {"commit_every": 1}, {"states": "host"}], ids=str)
def test_a_run_goes_on_from_a_ticket(given: dict[str, Any], tmp_path: Path) -> None:
    first = Run(tmp_path, **given)
    first.train(range(3))
    ticket, schedule = first.save(), first.scheduler.state_dict()
    assert len(ticket) < 10_000
    first.train(range(3, 5))  # newer than the checkpoint, and given up
    first.optimizer.close()

    second = Run(tmp_path, **given)
    second.load(ticket)
    second.scheduler.load_state_dict(schedule)
    second.train(range(3, 6))
    assert second.bits() == undisturbed(6)
    second.optimizer.close()


def test_what_wrappers_load_at_once_changes_and_reads_nothing(tmp_path: Path) -> None:
    """As accelerate's ``prepare`` does, before ``resume()`` and behind it."""
    run = Run(tmp_path)
    run.load(run.save())
    assert not run.optimizer.snapshots()
    run.train(range(2))
    ticket = run.save()
    before = run.bits(), run.optimizer.traffic()
    run.load(ticket)
    assert (run.bits(), run.optimizer.traffic()) == before
    assert run.save() == ticket  # no second snapshot of one step
    assert len(run.optimizer.snapshots()) == 1
    run.optimizer.close()


def test_a_snapshot_of_the_users_is_no_tickets(tmp_path: Path) -> None:
    """Each is dropped by who made it."""
    run = Run(tmp_path)
    run.train(range(1))
    run.optimizer.snapshot("best")
    ticket = run.optimizer.state_dict()
    run.optimizer.drop("best")
    run.train(range(1, 2))
    run.optimizer.load_state_dict(ticket)
    assert run.bits() == undisturbed(1)
    run.optimizer.close()


def test_an_older_ticket_goes_back_in_the_same_process(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(range(2))
    older, schedule = run.optimizer.state_dict(), copy.deepcopy(run.scheduler.state_dict())
    run.train(range(2, 4))
    newer = run.optimizer.state_dict()
    assert older[KEY]["step"] == 2
    assert newer[KEY]["step"] == 4
    run.optimizer.load_state_dict(older)
    run.scheduler.load_state_dict(schedule)
    run.train(range(2, 3))
    assert run.bits() == undisturbed(3)
    run.optimizer.close()


def test_states_that_were_loaded_and_not_stepped_are_kept(tmp_path: Path) -> None:
    """A run that begins from a whole state dict has something to name before its first step."""
    whole = Run(None)
    whole.train(range(2))
    run = Run(tmp_path / "run")
    run.model.load_state_dict(whole.model.state_dict())
    run.optimizer.load_state_dict(whole.optimizer.state_dict())
    run.scheduler.load_state_dict(whole.scheduler.state_dict())
    ticket, schedule = run.save(), run.scheduler.state_dict()
    run.optimizer.close()
    second = Run(tmp_path / "run")
    second.load(ticket)
    second.scheduler.load_state_dict(schedule)
    second.train(range(2, 4))
    assert second.bits() == undisturbed(4)
    second.optimizer.close()


def test_a_ticket_of_another_directory_names_what_is_there(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name) for name in "ab"]
    for run in runs:
        run.train(range(1))
    tickets = [run.optimizer.state_dict() for run in runs]
    there = snapshot_named_by(tickets[1])
    before = runs[1].bits()
    with pytest.raises(OptionError, match=f"does not have it: it has {there}"):
        runs[1].optimizer.load_state_dict(tickets[0])
    assert runs[1].bits() == before
    runs[1].train(range(1, 2))  # it is as good as before
    assert runs[1].bits() == undisturbed(2)
    scratch = AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(OptionError, match="the states are scratch"):
        scratch.load_state_dict(tickets[0])
    for run in runs:
        run.optimizer.close()


def test_what_cannot_be_a_ticket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match='"full" or "ticket"'):
        Run(tmp_path / "a", checkpoints="tickets")
    with pytest.raises(OptionError, match="Name the run's directory"):
        Run(None, checkpoints="ticket")
    run = Run(tmp_path / "b")
    fresh = run.optimizer.state_dict()
    run.train(range(1))
    with pytest.raises(OptionError, match="had taken no step"):
        run.optimizer.load_state_dict(fresh)
    ticket = run.optimizer.state_dict()
    with pytest.raises(OptionError, match="format 1 was expected"):
        run.optimizer.load_state_dict({**ticket, KEY: {**ticket[KEY], "format": 2}})
    with pytest.raises(OptionError, match="2 parameter groups"):
        run.optimizer.load_state_dict({**ticket, "param_groups": ticket["param_groups"] * 2})
    run.optimizer.close()


def test_a_ticket_within_extra_is_refused(tmp_path: Path) -> None:
    made: list[Run] = []
    asks = False

    def extra() -> dict[str, Any]:
        return {"optimizer": made[0].optimizer.state_dict()[KEY]} if asks else {}

    made.append(Run(tmp_path, extra=extra))
    made[0].train(range(1))
    asks = True
    with pytest.raises(OptionError, match="Leave it out of extra="):
        made[0].optimizer.commit()
    asks = False
    made[0].optimizer.close()


def test_one_rank_saves_what_all_go_on_from(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """Trainers ask rank 0 alone: the snapshot is made by all before."""
    for said, equal, step in ranks(2).run(with_tickets, tmp_path):
        assert said.startswith("A ticket of step 2 was requested, and no snapshot holds that step.")
        assert (equal, step) == (True, 2)
