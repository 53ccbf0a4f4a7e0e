"""`tensorstow plan --html`: one file with the tiers and the phases of a step."""

import json
import re
from pathlib import Path

import pytest
from torch import nn

from command_line import CommandLine
from machines import PROFILE

MODEL = f"{__name__}:build"


def build() -> nn.Module:
    """Return a few blocks."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "plan.html"


@pytest.fixture
def rates(tmp_path: Path) -> str:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(PROFILE.as_dict()))
    return str(file)


def test_a_page_shows_tiers_and_other_placements(page: Path, rates: str, cli: CommandLine) -> None:
    options = ["--headroom", "0", "--host", "32MiB", "--disk", "1GiB", "--profile", rates]
    assert str(page) in cli("plan", MODEL, *options, "--html", page)
    text = page.read_text()
    assert "HOST: 32.1 MiB of 32.0 MiB" not in text
    assert re.search(r"HOST: [\d.]+ MiB of 32\.0 MiB", text)
    assert "Other placements" in text
    shown = re.findall("Not predicted: ([^<]*)", text)
    assert shown == ["no directory was measured: `tensorstow calibrate DIR` does."]
    assert "http://" not in text
    assert "https://" not in text


def test_lanes_are_as_long_as_they_work(
    small: Path, page: Path, rates: str, cli: CommandLine
) -> None:
    size = ["--batch", "2", "--seq", "32", "--profile", rates]
    step = cli.json("plan", small, *size, "--html", page)["step"]
    text = page.read_text()
    assert "<small>" not in text
    assert "&lt;small&gt;" in text
    for phase in step["phases"]:
        width = 100 * phase["seconds"] / step["seconds"]
        assert f'<span class="cell" style="width:{width:.3f}%">' in text
    for lane in step["busy"]:
        assert f"<span>{lane} " in text


def test_a_page_that_was_given_a_batch_does_not_ask_for_it(
    small: Path,
    page: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: CommandLine,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(page.parent))  # no profile
    size = ["--batch", "2", "--seq", "32"]
    for model, options, asked in (
        (small, [], "--batch and --seq"),
        (MODEL, [], "a module:function that returns the model and the arguments of its forward"),
        (small, size, None),
    ):
        cli("plan", model, *options, "--card", "4090", "--html", page)
        told = re.findall(r"Not predicted: give ([^<]*)\.", page.read_text())
        assert told == ([] if asked is None else [asked])
    cli("plan", small, *size, "--html", page)
    text = page.read_text()
    assert "--batch" not in text
    assert "Not predicted: no profile of this machine" in text


def test_headroom_is_drawn_and_nominal_rates_are_marked(
    small: Path, page: Path, rates: str, cli: CommandLine
) -> None:
    drawn = ["--batch", "2", "--seq", "32", "--html", page]
    cli("plan", small, *drawn, "--card", "4090", "--profile", rates)
    text = page.read_text()
    assert re.search(r'title="headroom, left free: [\d.]+ MiB" style="width:[\d.]+%;backg', text)
    assert text.count("headroom, left free") >= 4  # a bar and its label, of two tiers
    assert "Rates are nominal, from data sheets: GeForce RTX 4090" in text
    assert "no GPU was measured" in text
    assert re.search(r"<p>About [\d.]+ m?s; most", text)
    cli("plan", small, *drawn, "--profile", rates, "--headroom", "0")
    text = page.read_text()
    assert "headroom, left free" not in text
    assert "nominal, from" not in text


def test_a_page_that_cannot_be_written_is_said(cli: CommandLine) -> None:
    assert "/nowhere/plan.html" in cli("plan", MODEL, "--html", "/nowhere/plan.html", status=2)
