"""State dicts that name a snapshot: what they hold, and that runs go on from them bit for bit."""

import copy
import io
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranks.durable import with_references
from ranks.pool import Ranks
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import DamageError, OptionError
from tensorstow.checkpoint.snapshot_reference import KEY, is_own, read_reference

SMALL = PipelinePolicy(chunk_elements=4096)


class Run:
    """A model with a buffer, an optimizer with references, and a schedule of its learning rate."""

    def __init__(self, directory: Path | None, **given: Any) -> None:  # noqa: ANN401
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
        if directory is not None:
            given = {"dir": directory, "states": "disk", "checkpoints": "reference", **given}
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

    def load(self, reference: bytes) -> None:
        self.optimizer.load_state_dict(torch.load(io.BytesIO(reference), weights_only=True))

    def bits(self) -> list[bytes]:
        return [t.numpy().tobytes() for t in self.model.state_dict().values()]


def undisturbed(steps: int) -> list[bytes]:
    run = Run(None)
    run.train(range(steps))
    return run.bits()


@pytest.mark.parametrize("given", [{}, {"commit_every": 1}, {"states": "host"}], ids=str)
def test_a_run_goes_on_from_a_reference(given: dict[str, Any], tmp_path: Path) -> None:
    first = Run(tmp_path, **given)
    first.train(range(3))
    reference, schedule = first.save(), first.scheduler.state_dict()
    assert len(reference) < 10_000
    first.train(range(3, 5))  # newer than the checkpoint, and given up
    first.optimizer.close()

    second = Run(tmp_path, **given)
    second.load(reference)
    second.scheduler.load_state_dict(schedule)
    second.train(range(3, 6))
    assert second.bits() == undisturbed(6)
    second.optimizer.close()


def without_digest(reference: dict[str, Any]) -> dict[str, Any]:
    """Return a reference as earlier versions wrote it."""
    fields = {key: value for key, value in reference[KEY].items() if key != "digest"}
    groups = [dict(group) for group in reference["param_groups"]]
    return {**reference, "param_groups": groups, KEY: fields}


@pytest.fixture(name="saved")
def make_saved(tmp_path: Path) -> Iterator[tuple[Run, bytes]]:
    """Return a run that is a step behind a reference, and the reference's file."""
    run = Run(tmp_path / "run", commit_every=None)
    run.train(range(1))
    file = run.save()
    run.train(range(1, 2))
    yield run, file
    run.optimizer.close()


def options(run: Run) -> str:
    return repr([{**group, "params": None} for group in run.optimizer.param_groups])


def test_no_flipped_bit_changes_what_a_reference_loads(saved: tuple[Run, bytes]) -> None:
    """Torch checks no sum of a file, and of these flips most are loaded by it."""
    run, file = saved
    run.load(file)
    before, wanted, damaged = run.bits(), options(run), 0
    for bit in range(0, 8 * len(file), 11):
        flipped = bytearray(file)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            state_dict = torch.load(io.BytesIO(flipped), weights_only=True)
        except Exception:  # noqa: BLE001, S112  # torch's, of many kinds
            continue
        try:
            run.optimizer.load_state_dict(state_dict)
        except (DamageError, OptionError):
            damaged += 1
        assert (run.bits(), options(run)) == (before, wanted), bit
    assert damaged > 100


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "lr": lambda reference: reference["param_groups"][0].update(lr=0.5),
    "tuple": lambda reference: reference["param_groups"][0].update(betas=(0.9, 0.9)),
    "key": lambda reference: reference["param_groups"][0].pop("weight_decay"),
    "step": lambda reference: reference[KEY].update(step=7),
    "snapshot": lambda reference: reference[KEY].update(snapshot=None),
    "note": lambda reference: reference[KEY].update(note="mine"),
    "name of the digest": lambda reference: reference[KEY].update(
        dhgest=reference[KEY].pop("digest")
    ),
    "another field": lambda reference: reference[KEY].update(mine=1),
    "no note": lambda reference: (reference[KEY].pop("note"), reference[KEY].pop("digest")),
    "params": lambda reference: reference["param_groups"][0]["params"].reverse(),
    "its key": lambda reference: reference.update(tensorstov=reference.pop(KEY)),
    "groups": lambda reference: reference.pop("param_groups"),
    "states": lambda reference: reference.update(state={0: {"step": 1.0}}),
    "text": lambda reference: reference.update({KEY: "a text"}),
    "a tensor for the format": lambda reference: reference[KEY].update(format=torch.ones(2)),
    "a tensor for the states": lambda reference: reference.update(state=torch.ones(2)),
    "nesting without end": lambda reference: reference["param_groups"][0].update(lr=nested()),
    "a sparse tensor": lambda reference: reference["param_groups"][0].update(
        lr=torch.eye(2).to_sparse()
    ),
    "a tensor without values": lambda reference: reference["param_groups"][0].update(
        lr=torch.empty(2, device="meta")
    ),
    "a key that is no text": lambda reference: reference["param_groups"][0].update({5: 1}),
}


def nested() -> list[Any]:
    """Return a list that holds itself."""
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("change", CHANGES)
def test_a_reference_that_is_not_what_was_saved_changes_nothing(
    change: str, saved: tuple[Run, bytes]
) -> None:
    run, file = saved
    reference = torch.load(io.BytesIO(file), weights_only=True)
    CHANGES[change](reference)
    before = run.bits(), options(run)
    with pytest.raises((DamageError, OptionError)) as found:
        run.optimizer.load_state_dict(reference)
    if change in {"lr", "tuple", "key"}:
        assert "set them in optimizer.param_groups afterwards" in str(found.value)
    assert (run.bits(), options(run)) == before
    run.train(range(2, 3))
    assert run.bits() == undisturbed(3)


def test_a_reference_of_an_earlier_version_is_loaded(tmp_path: Path) -> None:
    """Its snapshot was called "ticket-", which is a part of what the digest is of."""
    run = Run(tmp_path, commit_every=None)
    run.train(range(1))
    run.optimizer.snapshot("ticket-1-0123456789ab")
    assert is_own("ticket-1-0123456789ab")
    saved = run.optimizer.state_dict()
    assert saved[KEY]["snapshot"] == "ticket-1-0123456789ab"
    assert set(saved[KEY]) == {"format", "step", "snapshot", "note", "digest"}
    run.train(range(1, 2))
    run.optimizer.load_state_dict(saved)
    assert run.bits() == undisturbed(1)
    run.optimizer.close()


def test_lists_in_the_place_of_tuples_are_the_same_reference(saved: tuple[Run, bytes]) -> None:
    """As what passes through JSON has them, and other devices for tensors."""
    run, file = saved
    reference = torch.load(io.BytesIO(file), weights_only=True)
    reference["param_groups"][0]["betas"] = list(reference["param_groups"][0]["betas"])
    run.optimizer.load_state_dict(reference)
    assert run.bits() == undisturbed(1)


def test_a_reference_without_a_checksum_is_loaded_and_that_is_logged_once(
    saved: tuple[Run, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tensorstow.checkpoint.snapshot_reference._warned_without_digest", set())
    run, file = saved
    reference = without_digest(torch.load(io.BytesIO(file), weights_only=True))
    run.optimizer.load_state_dict(reference)
    run.optimizer.load_state_dict(reference)
    assert caplog.text.count("has no checksum") == 1
    assert "other options" not in caplog.text
    reference["param_groups"][0]["lr"] = 0.25
    run.train(range(1, 2))
    run.optimizer.load_state_dict(reference)
    assert "has other options than the optimizer at that step (lr)" in caplog.text
    assert run.optimizer.param_groups[0]["lr"] == 0.25


def test_other_options_are_logged_too_if_the_snapshot_is_the_current_one(
    saved: tuple[Run, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    run, file = saved
    run.load(file)
    whole = torch.load(io.BytesIO(file), weights_only=True)
    reference = without_digest(whole)
    for rate in (0.77, 0.78):
        caplog.clear()
        reference["param_groups"][0]["lr"] = rate
        run.optimizer.load_state_dict(reference)
        assert "has other options than the optimizer at that step (lr)" in caplog.text
        assert run.optimizer.param_groups[0]["lr"] == rate
    caplog.clear()
    run.optimizer.load_state_dict(reference)
    assert "other options" not in caplog.text
    with caplog.at_level(logging.INFO, "tensorstow"):
        run.optimizer.load_state_dict(whole)
    assert [r.levelname for r in caplog.records if "other options" in r.message] == ["INFO"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", math.nan),
        ("lr", "a text"),
        ("betas", (0.9, 1.5)),
        ("amsgrad", True),
        ("weight_decya", 0.1),
    ],
)
def test_impossible_options_of_an_old_reference_change_nothing(
    key: str, value: object, saved: tuple[Run, bytes]
) -> None:
    run, file = saved
    reference = without_digest(torch.load(io.BytesIO(file), weights_only=True))
    reference["param_groups"][0][key] = value
    before = run.bits(), options(run)
    with pytest.raises(OptionError, match=key):
        run.optimizer.load_state_dict(reference)
    assert (run.bits(), options(run)) == before


def test_a_schedule_that_stepped_after_the_commit_is_in_the_reference(tmp_path: Path) -> None:
    run = Run(tmp_path, commit_every=1)
    run.train(range(2))
    reference, wanted = run.save(), options(run)
    run.train(range(2, 4))
    run.load(reference)
    assert options(run) == wanted
    run.optimizer.close()


def test_what_wrappers_load_at_once_changes_and_reads_nothing(tmp_path: Path) -> None:
    """As accelerate's ``prepare`` does, before ``resume()`` and behind it."""
    run = Run(tmp_path)
    run.load(run.save())
    assert not run.optimizer.snapshots()
    run.train(range(2))
    reference = run.save()
    before = run.bits(), run.optimizer._traffic()
    run.load(reference)
    assert (run.bits(), run.optimizer._traffic()) == before
    assert run.save() == reference  # no second snapshot of one step
    assert len(run.optimizer.snapshots()) == 1
    run.optimizer.close()


def test_a_snapshot_of_the_users_is_no_reference_of_ours(tmp_path: Path) -> None:
    """Each is dropped by who made it."""
    run = Run(tmp_path)
    run.train(range(1))
    run.optimizer.snapshot("best")
    reference = run.optimizer.state_dict()
    run.optimizer.drop("best")
    run.train(range(1, 2))
    run.optimizer.load_state_dict(reference)
    assert run.bits() == undisturbed(1)
    run.optimizer.close()


def test_an_older_reference_goes_back_in_the_same_process(tmp_path: Path) -> None:
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
    reference, schedule = run.save(), run.scheduler.state_dict()
    run.optimizer.close()
    second = Run(tmp_path / "run")
    second.load(reference)
    second.scheduler.load_state_dict(schedule)
    second.train(range(2, 4))
    assert second.bits() == undisturbed(4)
    second.optimizer.close()


def test_a_reference_of_another_directory_names_what_is_there(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name) for name in "ab"]
    for run in runs:
        run.train(range(1))
    references = [run.optimizer.state_dict() for run in runs]
    there = read_reference(references[1]).snapshot
    before = runs[1].bits()
    with pytest.raises(OptionError, match=f"does not have it: it has {there}"):
        runs[1].optimizer.load_state_dict(references[0])
    assert runs[1].bits() == before
    runs[1].train(range(1, 2))  # it is as good as before
    assert runs[1].bits() == undisturbed(2)
    scratch = AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(OptionError, match="the states are scratch"):
        scratch.load_state_dict(references[0])
    for run in runs:
        run.optimizer.close()


def test_what_cannot_be_a_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match='"full" or "reference"'):
        Run(tmp_path / "a", checkpoints="refrence")
    with pytest.raises(OptionError, match="Pass the run's directory"):
        Run(None, checkpoints="reference")
    run = Run(tmp_path / "b")
    fresh = run.optimizer.state_dict()
    run.train(range(1))
    with pytest.raises(OptionError, match="had taken no step"):
        run.optimizer.load_state_dict(fresh)
    reference = run.optimizer.state_dict()
    with pytest.raises(OptionError, match="format 1 was expected"):
        run.optimizer.load_state_dict({**reference, KEY: {**reference[KEY], "format": 2}})
    old = without_digest(reference)
    with pytest.raises(OptionError, match="2 parameter groups"):
        run.optimizer.load_state_dict({**old, "param_groups": old["param_groups"] * 2})
    run.optimizer.close()


def test_a_reference_within_extra_is_refused(tmp_path: Path) -> None:
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
    for said, equal, step in ranks(2).run(with_references, tmp_path):
        assert said.startswith(
            "A snapshot reference of step 2 was requested, and no snapshot holds that step."
        )
        assert (equal, step) == (True, 2)
