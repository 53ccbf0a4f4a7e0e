from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import CommandLine
from tensorstow import AdamW
from tensorstow.cli.verify import run as command
from tensorstow.cli.verify import training
from tensorstow.cli.verify.rows import COMMITTED, VerifiedRun, runs_of
from tensorstow.cli.verify.training import Outcome

MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64))
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "verified_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "verified_model:make"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


class Noted(AdamW):
    """Notes how each run is made, and the step that it goes on from."""

    made: list[tuple[object, object, object]]
    resumed: list[int | None]

    def __init__(self, *given: Any, **keywords: Any) -> None:  # noqa: ANN401
        """Make it as AdamW."""
        self.made.append(tuple(keywords[name] for name in ("states", "state_format", "overlap")))
        super().__init__(*given, **keywords)

    def resume(self, which: str | int | None = None) -> int | None:
        """Go on as AdamW does."""
        found = super().resume(which)
        self.resumed.append(found)
        return found


def test_all_runs_of_a_model_are_equal_and_leave_nothing(
    model: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: CommandLine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And each is what it is called."""
    monkeypatch.setattr(Noted, "made", [], raising=False)
    monkeypatch.setattr(Noted, "resumed", [], raising=False)
    monkeypatch.setattr(training.tensorstow, "AdamW", Noted)
    said = cli.json("verify", place, "--model", model, "--device", "cpu")
    assert said["is_equal"]
    assert said["sentence"].startswith("All 6 runs are bitwise equal")
    assert len({run["sha256"] for run in said["runs"]}) == 1
    assert len({tuple(run["losses"]) for run in said["runs"]}) == 1
    assert [run["overlap"] for run in said["runs"] if run["states"] == "disk"] == [
        "none",
        "forward",
        "backward",
        "none",
    ]
    assert said["runs"][-1]["is_killed"]
    assert Noted.made == [(r.states, r.state_format, r.overlap) for r in runs_of(["fp32"])]
    assert Noted.resumed == [COMMITTED]
    assert list(place.iterdir()) == []
    assert caplog.messages == []  # a warning would stand beside the outcome


def pretended(monkeypatch: pytest.MonkeyPatch, wrong: VerifiedRun) -> None:
    """Let ``wrong`` end with another parameter."""
    right = Outcome((2.0, 1.0), {"w": "1" * 64}, {"exp_avg of w": "3" * 64}, 0.5)

    def train(run: VerifiedRun, *_: object) -> Outcome:
        return replace(right, digests={"w": "2" * 64}) if run == wrong else right

    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(command, "_kill", lambda *_: None)


def test_a_difference_is_said_with_what_differed_first(
    place: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    pretended(monkeypatch, VerifiedRun("bf16", "disk", "split", "backward"))
    said = cli("verify", place, "--device", "cpu", status=1)
    assert (
        'NOT EQUAL: bf16, states on disk as split, overlap="backward":'
        " all losses are equal, and the parameter w differs at the end." in said
    )
    assert said.count("differs ") == 2  # in the table and in the sentence
    assert "\x1b" not in said


class Spoiled(AdamW):
    """Its first parameter, or a state of it, has another lowest bit when all steps are over."""

    spoils = "parameter"

    def synchronize(self) -> None:
        """Wait, and change a bit."""
        super().synchronize()
        (first, *_) = self.param_groups[0]["params"]
        if self.spoils == "parameter":
            first.data.view(-1).view(torch.int32)[3] ^= 1
            return
        saved = self.state_dict()
        saved["state"][0][self.spoils].view(-1).view(torch.int32)[3] ^= 1
        self.load_state_dict(saved)


@pytest.mark.parametrize("spoils", ["parameter", "exp_avg", "exp_avg_sq"])
def test_one_bit_of_a_parameter_or_a_state_is_a_failure(
    spoils: str,
    model: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: CommandLine,
) -> None:
    """Behind the last step, where no loss and no other parameter shows it."""
    true_train, wrong = training.train, VerifiedRun("fp32", "disk", "fp32", "forward")

    def train(run: VerifiedRun, *given: object) -> Outcome:
        with monkeypatch.context() as patch:
            if run == wrong:
                patch.setattr(Spoiled, "spoils", spoils)
                patch.setattr(training.tensorstow, "AdamW", Spoiled)
            return true_train(run, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(command, "_kill", lambda *_: None)
    said = cli.json("verify", place, "--model", model, "--device", "cpu", status=1)
    assert not said["is_equal"]
    what = "the parameter 0.weight" if spoils == "parameter" else f"the state {spoils} of 0.weight"
    differs = f"all losses are equal, and {what} differs at the end"
    assert [run["differs"] for run in said["runs"]] == [None, None, None, differs, None, None]


def test_a_model_that_does_not_repeat_itself_is_no_verdict(
    place: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    pretended(monkeypatch, VerifiedRun("fp32", "host", "fp32", is_repeat=True))
    error = cli.json("verify", place, "--device", "cpu", status=2)["error"]
    assert "The model itself is not deterministic on cpu" in error["message"]


def test_an_unknown_device_is_refused(cli: CommandLine, place: Path) -> None:
    assert "--device abacus was given" in cli("verify", place, "--device", "abacus", status=2)
