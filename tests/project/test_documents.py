"""The README and the guides: commands, files and options that are named exist."""

import argparse
import importlib
import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import tensorstow
from pages import PAGES
from tensorstow.cli.main import make_parser
from tree import ROOT

OTHERS = ("CONTRIBUTING.md", "ARCHITECTURE.md", "docs/roadmap.md", "benchmarks/compatibility.md")
ALL = [*PAGES, *(ROOT / name for name in OTHERS)]


def code_of(page: Path) -> list[str]:
    """Return what a page shows as code outside of blocks of Python: spans and indented lines."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text) + re.findall(r"^ {4}(\S.*)", text, re.MULTILINE)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_commands_and_files_that_are_named_are_there(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    actions = make_parser()._actions
    commands = next(a.choices for a in actions if isinstance(a, argparse._SubParsersAction))
    for code in code_of(page):
        if found := re.match(r"make ([a-z0-9-]+)", code):
            assert found[1] in targets, f"{page.name}: {code}"
        if found := re.match(r"tensorstow ([a-z]+)", code):
            assert found[1] in commands, f"{page.name}: {code}"
        if re.fullmatch(r"(docs|examples|tests|benchmarks|tools|src|csrc|\.ci)/[\w./-]*", code):
            assert (ROOT / code).exists(), f"{page.name}: {code}"
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_commands_that_pages_show_as_blocks_have_options_that_are_there() -> None:
    shown = [
        shlex.split(line, comments=True)[1:]
        for page in PAGES
        for line in re.findall(r"^ {4}(tensorstow .*)", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(shown) >= 3
    for words in shown:
        assert make_parser().parse_args(words)


def test_the_release_workflow_is_one_that_can_be_read() -> None:
    """Jobs wait for jobs that are there, and each step does one thing."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    jobs = workflow["jobs"]
    assert [job.get("needs") for job in jobs.values()] == [None, "build", "install"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step.get("uses", "a/b@c")) for step in steps)
    assert any("--only-binary :all:" in step.get("run", "") for step in steps)


def test_one_line_examples_of_the_public_classes_can_be_called() -> None:
    """In docstrings, between double backticks: names that exist, keywords that are taken."""
    parameters = [nn.Parameter(torch.ones(3, 3))]
    known: dict[str, Any] = {name: getattr(tensorstow, name) for name in tensorstow.__all__}
    known |= {"tensorstow": tensorstow, "torch": torch}
    known |= {"partial": partial, "params": parameters, "stow": tensorstow.stow}
    found = []
    for name in tensorstow.__all__:
        text = " ".join((getattr(tensorstow, name).__doc__ or "").split())
        found += re.findall(
            r"``((?:StowedOptimizer|partial|AdamW|Budget|Plan)\([^`.]+.*?\))``", text
        )
    assert len(found) >= 2
    for code in found:
        eval(code.replace(', dir="/nvme/run"', ""), dict(known))  # noqa: S307


def test_each_decision_record_has_a_number_of_its_own() -> None:
    records = sorted((ROOT / "docs/adr").glob("0*.md"))
    assert [int(r.name[:4]) for r in records] == list(range(1, len(records) + 1))
    titles = [r.read_text("utf-8").partition("\n")[0].partition(": ") for r in records]
    assert [title[0] for title in titles] == [f"# {r.name[:4]}" for r in records]
    index = (ROOT / "docs/adr/README.md").read_text("utf-8")
    listed = re.findall(r"^\* \[(\d{4})\]\((.+)\): (.+)$", index, re.MULTILINE)
    said = [(r.name[:4], r.name, title[2]) for r, title in zip(records, titles, strict=True)]
    assert sorted(listed) == said


def test_a_decision_that_was_amended_says_so() -> None:
    status = {
        record.name[:4]: record.read_text(encoding="utf-8").splitlines()[2]
        for record in (ROOT / "docs/adr").glob("0*.md")
    }
    amended = {
        (old, new)
        for new, text in status.items()
        for part in text.split("; ")
        if part.startswith("amends ")
        for old in re.findall(r"\d{4}", part)
    }
    assert amended
    assert all(f"; {new} amends it" in status[old] for old, new in amended)


def test_the_limitations_give_the_gpu_s_figure() -> None:
    rows = json.loads((ROOT / "benchmarks/results/gpu.json").read_text("utf-8"))["figures"]
    (speed,) = (
        row["measured"]
        for row in rows
        if row["name"]
        == "ours, the optimizer alone, states HOST, backward: throughput / no offload"
    )
    assert f"a step takes {1 / speed:.2f} times" in (ROOT / "docs/limitations.md").read_text(
        "utf-8"
    )


def test_the_reference_has_every_public_name() -> None:
    pages = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs/reference").glob("*.md")}
    shown = set(re.findall(r"\.\. auto\w+:: (?:[\w.]+\.)?(\w+)", "\n".join(pages.values())))
    assert set(tensorstow.__all__) - {"__version__", "StowError", "errors"} <= shown
    for module in ("errors", "losses", "nn"):
        assert f".. automodule:: tensorstow.{module}\n   :members:" in pages[module]
    listed = set(re.findall(r"^   (?:tensorstow\.[\w.]+\.)?(\w+)$", pages["python"], re.MULTILINE))
    assert set(tensorstow.__all__) - {"__version__", "StowError", "errors"} <= listed


def test_the_comparison_has_what_was_measured_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    pages = importlib.import_module("site_pages")
    lines = [line for line in pages.comparison() if line.startswith("| ")]
    rows = [
        row
        for path in sorted((ROOT / "benchmarks/results").glob("*.json"))
        for row in json.loads(path.read_text("utf-8"))["figures"]
        if any(peer in row["name"] for peer in pages.PEERS)
    ]
    measured = [row for row in rows if row["measured"] is not None]
    assert 5 < len(measured) < len(rows)
    figures = [line for line in lines if not line.startswith("| figure")]
    assert [line.split(" | ")[0] for line in figures] == [f"| {row['name']}" for row in measured]
    for line, row in zip(figures, measured, strict=True):
        assert float(line.split(" | ")[2].split()[0]) == pytest.approx(row["measured"], rel=0.01)
