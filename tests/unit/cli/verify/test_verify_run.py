import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tensorstow.cli.main import main
from tensorstow.cli.verify import run as command
from tensorstow.cli.verify.rows import VerifiedRun
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


def test_all_runs_of_a_model_are_equal_and_leave_nothing(
    model: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(place), "--model", model, "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
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
    assert list(place.iterdir()) == []


def pretended(monkeypatch: pytest.MonkeyPatch, wrong: VerifiedRun) -> None:
    """Let ``wrong`` end with another parameter."""
    right = Outcome((2.0, 1.0), {"w": "1" * 64}, 0.5)

    def train(run: VerifiedRun, *_: object) -> Outcome:
        return replace(right, digests={"w": "2" * 64}) if run == wrong else right

    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(command, "_kill", lambda *_: None)


def test_a_difference_is_said_with_what_differed_first(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended(monkeypatch, VerifiedRun("bf16", "disk", "split", "backward"))
    assert main(["verify", str(place), "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert (
        'NOT EQUAL: bf16, states on disk as split, overlap="backward":'
        " all losses are equal, and the parameter w differs at the end." in said
    )
    assert said.count("differs ") == 2  # in the table and in the sentence
    assert "\x1b" not in said


def test_a_model_that_does_not_repeat_itself_is_no_verdict(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended(monkeypatch, VerifiedRun("fp32", "host", "fp32", is_repeat=True))
    assert main(["verify", str(place), "--device", "cpu"]) == 2
    assert "The model itself is not deterministic on cpu" in capsys.readouterr().err


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    assert main(["verify", str(place), "--device", "abacus"]) == 2
    assert "--device abacus was given" in capsys.readouterr().err


def test_an_interrupt_leaves_no_file_and_no_process(place: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tensorstow", "verify", str(place), "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    while not list(place.glob("*/killed-*")) and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to all of the group
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said.decode().strip()) == (130, "tensorstow: interrupted")
    assert list(place.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
