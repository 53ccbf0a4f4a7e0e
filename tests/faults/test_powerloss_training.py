"""The power is lost in the middle of training: the last commit is whole, to the bit."""

import itertools
from pathlib import Path

import pytest
import torch

from crash.world import Case
from powerloss.events import ManifestCommitted, Promised, Written
from powerloss.training import (
    ForgetfulTrainingDisk,
    HastyTrainingDisk,
    TrainingDisk,
    barriers_and_others,
    crash_training,
    record_training,
)
from tensorstow.checkpoint.commits import Commits
from tensorstow.checkpoint.committed_extents import CommittedExtents
from tensorstow.states.native_pipeline import UpdatePipeline
from tensorstow.step.param_table import ParamTable

CASES = [
    Case("none", "split", commit_every=2, pin_every=4),
    Case("forward", "fp32", commit_every=3, ram_budget="1100KiB"),
    Case("backward", "int8", commit_every=1, pin_every=3),
    Case("forward", "bf16", commit_every=None, pin_every=5),
    Case("speculative", "split", commit_every=2, clips=True),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("case", "every"),
    [
        # The one of int8 commits every step beside backward, which takes ten seconds.
        *((case, 3) for case in CASES if case.state_format != "int8"),
        *(pytest.param(case, 1, marks=pytest.mark.soak) for case in CASES),
    ],
    ids=lambda c: f"{c.overlap}-{c.state_format}" if isinstance(c, Case) else f"every {c}",
)
def test_every_commit_survives(case: Case, every: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    events = record_training(case, root, TrainingDisk(), stops=(5, 9))
    assert sum(isinstance(e, Promised) for e in events) >= 2
    assert sum(isinstance(e, Written) for e in events) > 100
    points = barriers_and_others(events, others=12, seed=1)[::every]
    assert crash_training(case, events, root, points, seed=1) == []


@pytest.mark.parametrize("disk", [ForgetfulTrainingDisk, HastyTrainingDisk])
def test_a_missing_barrier_is_seen(disk: type[TrainingDisk], tmp_path: Path) -> None:
    case, root = Case(commit_every=2), tmp_path / "run"
    events = record_training(case, root, disk(), stops=(6,))
    behind = [i + 1 for i, e in enumerate(events) if isinstance(e, ManifestCommitted)]
    assert crash_training(case, events, root, behind, seed=1) != []


def test_a_commit_that_does_not_wait_for_writes_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, root = Case(commit_every=2), tmp_path / "run"
    wait, commits, prepare = UpdatePipeline.wait_written, itertools.count(), Commits.prepare

    def prepare_slowly(commits: Commits, kept: ParamTable) -> None:
        assert kept.store.engine is not None
        kept.store.engine.inject_fault("write", delay_us=200_000)  # the first of the commit
        prepare(commits, kept)

    with monkeypatch.context() as patch:
        # The first one waits: without it there is nothing to come back to.
        patch.setattr(UpdatePipeline, "wait_written", lambda p: None if next(commits) else wait(p))
        patch.setattr(Commits, "prepare", prepare_slowly)
        events = record_training(case, root, TrainingDisk(), stops=(6,))
    behind = [i + 1 for i, e in enumerate(events) if isinstance(e, ManifestCommitted)]
    assert crash_training(case, events, root, behind, seed=1) != []


def test_a_committed_extent_that_is_written_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, root = Case(commit_every=2), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(CommittedExtents, "retarget", lambda *_: None)
        events = record_training(case, root, TrainingDisk(), stops=(6,))
    ends = [i for i, e in enumerate(events) if isinstance(e, ManifestCommitted)]
    between = [(a + b) // 2 for a, b in itertools.pairwise(ends)]
    assert crash_training(case, events, root, between, seed=1) != []
