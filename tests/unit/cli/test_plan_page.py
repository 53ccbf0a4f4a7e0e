"""`tensorstow plan --html`: one file with the tiers and the phases of a step."""

import json
import re
from pathlib import Path

import pytest
from torch import nn

from machines import PROFILE
from tensorstow.cli.main import main

MODEL = f"{__name__}:build"


def build() -> nn.Module:
    """Return a few blocks."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


@pytest.fixture
def rates(tmp_path: Path) -> str:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(PROFILE.as_dict()))
    return str(file)


def test_a_page_shows_tiers_and_other_placements(
    tmp_path: Path, rates: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    options = [
        "--headroom",
        "0",
        "--host",
        "32MiB",
        "--disk",
        "1GiB",
        "--html",
        str(page),
        "--profile",
        rates,
    ]
    assert main(["plan", MODEL, *options]) == 0
    assert f"{page}" in capsys.readouterr().out
    text = page.read_text()
    assert "HOST: 32.1 MiB of 32.0 MiB" not in text
    assert re.search(r"HOST: [\d.]+ MiB of 32\.0 MiB", text)
    assert "Other placements" in text
    shown = re.findall("Not predicted: ([^<]*)", text)
    assert shown == ["no directory was measured: `tensorstow calibrate DIR` does."]
    assert "http://" not in text
    assert "https://" not in text


def test_lanes_are_as_long_as_they_work(
    tmp_path: Path, rates: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "<small>.json"  # a name that is text, not markup
    given = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100}
    config.write_text(json.dumps(given))
    page = tmp_path / "plan.html"
    size = ["--batch", "2", "--seq", "32", "--profile", rates]
    assert main(["plan", str(config), *size, "--html", str(page), "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    text = page.read_text()
    assert "<small>" not in text
    assert "&lt;small&gt;" in text
    for phase in step["phases"]:
        width = 100 * phase["seconds"] / step["seconds"]
        assert f'<span class="cell" style="width:{width:.3f}%">' in text
    for lane in step["busy"]:
        assert f"<span>{lane} " in text


def test_a_page_that_was_given_a_batch_does_not_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no profile
    config = tmp_path / "small.json"
    given = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100}
    config.write_text(json.dumps(given))
    page = tmp_path / "plan.html"
    size = ["--batch", "2", "--seq", "32"]
    for model, options, asked in (
        (str(config), [], "--batch and --seq"),
        (MODEL, [], "a module:function that returns the model and the arguments of its forward"),
        (str(config), size, None),
    ):
        assert main(["plan", model, *options, "--card", "4090", "--html", str(page)]) == 0
        told = re.findall(r"Not predicted: give ([^<]*)\.", page.read_text())
        assert told == ([] if asked is None else [asked])
    assert main(["plan", str(config), *size, "--html", str(page)]) == 0
    text = page.read_text()
    assert "--batch" not in text
    assert "Not predicted: no profile of this machine" in text
    capsys.readouterr()


def test_headroom_is_drawn_and_nominal_rates_are_marked(tmp_path: Path, rates: str) -> None:
    config = tmp_path / "small.json"
    given = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100}
    config.write_text(json.dumps(given))
    page = tmp_path / "plan.html"
    drawn = ["--batch", "2", "--seq", "32", "--html", str(page)]
    assert main(["plan", str(config), *drawn, "--card", "4090", "--profile", rates]) == 0
    text = page.read_text()
    assert re.search(r'title="headroom, left free: [\d.]+ MiB" style="width:[\d.]+%;backg', text)
    assert text.count("headroom, left free") >= 4  # a bar and its label, of two tiers
    assert "Rates are nominal, from data sheets: GeForce RTX 4090" in text
    assert "no GPU was measured" in text
    assert re.search(r"<p>About [\d.]+ m?s; most", text)
    assert main(["plan", str(config), *drawn, "--profile", rates, "--headroom", "0"]) == 0
    text = page.read_text()
    assert "headroom, left free" not in text
    assert "nominal, from" not in text


def test_a_page_that_cannot_be_written_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MODEL, "--html", "/nowhere/plan.html"]) == 2
    assert "/nowhere/plan.html" in capsys.readouterr().err
