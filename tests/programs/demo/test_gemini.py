import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from demo import gemini
from demo.__main__ import make_parser
from demo.configurations import SMALL
from demo.gemini import FRACTIONS, HEADS, POLICIES, GeminiResult, as_json, rows_of
from demo.gemini_worker import train
from tensorstow.cli.main import main
from tensorstow.cli.output import print_table


def results(losses: tuple[float, ...]) -> list[GeminiResult]:
    return [
        GeminiResult(policy, fraction, losses, 1.5, (200 - int(100 * fraction)) << 20, 300 << 20)
        for policy in POLICIES
        for fraction in FRACTIONS
    ]


def test_the_table_has_a_line_for_each_run_and_what_it_saves() -> None:
    rows = rows_of(results((1.0, 2.0, 3.0)))
    assert len(rows) == len(POLICIES) * len(FRACTIONS)
    assert [row[-1] for row in rows] == ["", "100"] * len(POLICIES)


def test_the_table_of_the_real_size_fits_a_terminal() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    rows = rows_of(results((10.955, 10.959, 10.974)))
    print_table(console, HEADS, rows, numbers_from=1)
    assert "10.955" in console.file.getvalue()
    assert max(map(len, console.file.getvalue().splitlines())) > 60  # not row by row


def test_losses_that_differ_are_told() -> None:
    equal = results((1.0, 2.0, 3.0))
    assert as_json(equal, SMALL)["is_equal"]
    assert not as_json([*equal, *results((1.0, 2.0, 3.5))], SMALL)["is_equal"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_run_has_the_same_losses(tmp_path: Path, policy: str) -> None:
    pytest.importorskip("transformers")
    plain = train("without", 0.0, SMALL, str(tmp_path))
    found = [train(policy, fraction, SMALL, str(tmp_path)) for fraction in FRACTIONS]
    assert {result.losses for result in found} == {plain.losses}
    assert len(set(plain.losses)) == 3
    assert all((r.peak_rss_bytes or r.rss_bytes) >= r.rss_bytes > 0 for r in found)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(gemini, "POLICIES", (gemini.WITHOUT, "cpu"))
    monkeypatch.setattr(gemini, "FRACTIONS", (1.0,))
    given = ["--gemini", "--small", "--json", "--out", str(tmp_path)]
    assert main([*given, "--directory", str(tmp_path)], make_parser()) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["is_equal"]
    assert printed["state_bytes"] == 8 * SMALL.parameters
    assert len(printed["rows"]) == 2
