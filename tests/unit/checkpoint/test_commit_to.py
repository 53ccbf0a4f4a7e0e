"""A run whose directory is gone says so at the next commit, and goes on in another one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crash.world import digest
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import OptionError, UnlinkedError

SCHEDULES = ("none", "forward", "backward")


class Run:
    """A small model and its optimizer."""

    def __init__(self, directory: Path | None, overlap: str = "none", **given: Any) -> None:  # noqa: ANN401
        torch.manual_seed(3)
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(7, 40), nn.BatchNorm1d(40), nn.Linear(40, 3)).double()
        self.model = self.model.to(torch.bfloat16)
        stowed: dict[str, Any] = {"module": self.model, "overlap": overlap}
        if directory is not None:
            stowed |= {"states": "disk", "dir": directory, "commit_every": None, **given}
        policy = PipelinePolicy(chunk_elements=64, backend="threads", depth=2)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2, policy=policy, **stowed)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.arange(35, dtype=torch.bfloat16).view(5, 7).sin()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def facts(self) -> str:
        self.optimizer.wait()
        return digest([self.model.state_dict(), self.optimizer.state_dict()])


def undisturbed(steps: int) -> str:
    run = Run(None)
    run.train(steps)
    return run.facts()


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_a_run_goes_on_elsewhere_with_the_same_bits(overlap: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", overlap, extra=lambda: {"at": 5})
    run.train(2)
    run.optimizer.commit()
    run.train(2)
    run.optimizer.synchronize()
    shutil.rmtree(tmp_path / "run")
    run.train(1)
    with pytest.raises(UnlinkedError, match="lock, and it is not there any more"):
        run.optimizer.commit()
    with pytest.raises(UnlinkedError):
        run.optimizer.snapshot("keep")
    assert run.optimizer.commit_to(tmp_path / "other") == 5
    assert not (tmp_path / "run").exists()
    again = run.facts()
    assert again == undisturbed(5)
    run.train(1)
    run.optimizer.snapshot("six")
    run.train(1)
    run.optimizer.close()
    found = Run(tmp_path / "other", overlap)
    assert found.optimizer.resume() == 6
    assert found.optimizer.extra == {"at": 5}
    found.train(1)
    assert found.facts() == undisturbed(7)
    found.optimizer.close()


def test_the_first_step_behind_the_commit_says_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", commit_every=2)
    run.train(2)
    run.optimizer.synchronize()
    (tmp_path / "run").rename(tmp_path / "moved")
    run.train(2)
    with pytest.raises(UnlinkedError):
        run.train(1)  # the commit of step 4 was under way behind it
    run.optimizer.commit_to(tmp_path / "other")
    run.optimizer.step()  # with the gradients that were there
    run.optimizer.zero_grad()
    assert run.facts() == undisturbed(5)
    run.optimizer.close()
    old = Run(tmp_path / "moved")
    assert old.optimizer.resume() == 2
    old.optimizer.close()


def test_where_a_run_is_nothing_is_changed(tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    other.train(1)
    other.optimizer.commit()
    other.optimizer.close()
    run = Run(tmp_path / "run")
    run.train(1)
    with pytest.raises(OptionError, match=r"other, and a run is committed there"):
        run.optimizer.commit_to(tmp_path / "other")
    run.train(1)
    assert run.optimizer.commit() == 2
    run.optimizer.close()
    again = Run(tmp_path / "run")
    assert again.optimizer.resume() == 2
    again.optimizer.close()


def test_states_that_are_scratch_are_committed_nowhere(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"commit_to\(\) was requested, and the states are scr"):
        Run(None).optimizer.commit_to(tmp_path / "other")


def test_extra_goes_with_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.train(1)
    run.optimizer.commit({"epoch": 3})
    with pytest.raises(OptionError, match=r"commit_to\(\) was called without extra"):
        run.optimizer.commit_to(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(TypeError):
        run.optimizer.commit_to(tmp_path / "other", {"epoch": object()})
    run.optimizer.commit_to(tmp_path / "other", {"epoch": 3})
    run.optimizer.close()
    found = Run(tmp_path / "other")
    assert found.optimizer.resume() == 1
    assert found.optimizer.extra == {"epoch": 3}
    with pytest.raises(OptionError, match="without extra"):
        found.optimizer.commit_to(tmp_path / "third")
    found.optimizer.commit_to(tmp_path / "third", {})
    found.optimizer.close()
