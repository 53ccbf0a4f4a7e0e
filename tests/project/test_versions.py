"""Which releases are supported and tested: one truth for the page, the workflow and the set-up."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tree import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NAMES = {"TRL": "trl", "Lightning": "lightning", "LLaMA-Factory": "llamafactory"}
"""Names of packages that the page writes otherwise."""


def rows() -> dict[str, tuple[str, str]]:
    """Return the page's table: package, and what is supported and tested."""
    text = (ROOT / "docs/versions.md").read_text("utf-8")
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {NAMES.get(name, name): (supported, tested) for name, supported, tested in cells[2:]}


def pinned() -> dict[str, str]:
    """Return the releases of tools/constraints.txt, and those that tools/setup.sh names."""
    text = (ROOT / "tools/constraints.txt").read_text("utf-8")
    trainers = re.search(r'TRAINERS="(.*?)"', setup(), re.DOTALL)
    assert trainers is not None
    pairs = re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE)
    return dict(pairs + re.findall(r"([\w-]+)==(\S+)", trainers[1]))


def required() -> dict[str, str]:
    """Return the oldest release that each requirement takes; empty: any."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found: dict[str, str] = {}
    for requirement in [requirement for listed in lists for requirement in listed]:
        name, _, least = requirement.partition(">=")
        found[name] = least or found.get(name, "")
    return found


def setup() -> str:
    return (ROOT / "tools/setup.sh").read_text("utf-8")


def matrix() -> list[dict[str, str]]:
    """Return the combinations that continuous integration tests."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text("utf-8"))
    found: list[dict[str, str]] = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    return found


def test_the_page_has_the_releases_that_are_required_and_installed() -> None:
    table, oldest, tested = rows(), required(), pinned()
    trainers = {re.split(r"[>=]", name)[0] for name in PROJECT["optional-dependencies"]["trainers"]}
    assert trainers | {"Python", "torch"} <= table.keys()
    for name in table.keys() - {"Python", "torch"}:
        supported, release = table[name]
        assert release == tested[name], name
        if name in trainers:
            wanted = f"{oldest[name]} and newer" if oldest[name] else "any that transformers takes"
            assert supported == wanted, name


def test_the_page_has_the_pythons_and_torches_of_the_workflow() -> None:
    table = rows()
    pythons = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert table["Python"][0] == f"{pythons[0]} to {pythons[-1]}"
    assert table["torch"][0] == f"{required()['torch']} and newer"
    assert table["torch"][1] == ", ".join(row["torch"] for row in matrix())
    assert table["Python"][1] == ", ".join(row["python"] for row in matrix())
    assert {row["python"] for row in matrix()} <= set(pythons)


def test_the_workflow_runs_everything_with_the_oldest_and_the_newest_torch() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text("utf-8"))
    (job,) = workflow["jobs"].values()
    newest = re.search(r"^TORCH_VERSION=\$\{\w+:-([\d.]+)\}", setup(), re.MULTILINE)
    assert newest is not None
    oldest = required()["torch"] + ".0"
    assert [row["torch"] for row in matrix()] == [oldest, newest[1]]
    assert matrix()[0]["python"] == PROJECT["requires-python"].removeprefix(">=")
    assert job["env"] == {"TENSORSTOW_TORCH_VERSION": "${{ matrix.torch }}"}
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    known = {s["uses"] for j in release["jobs"].values() for s in j["steps"] if "uses" in s}
    assert {step["uses"] for step in job["steps"] if "uses" in step} <= known
    # Python's YAML reads the key `on` as true.
    assert set(workflow[True]) == {"push", "pull_request"}


def test_files_of_other_tools_have_the_pinned_releases() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    packages = [
        p for repo in hooks for hook in repo["hooks"] for p in hook["additional_dependencies"]
    ]
    assert {repo["repo"] for repo in hooks} == {"local"}
    assert packages
    for package in packages:
        name, _, release = package.partition("==")
        assert release == pinned()[name]
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    assert set(re.findall(r"torch==([\d.]+)", dockerfile)) == {matrix()[-1]["torch"]}
    assert re.search(r"^ARG PYTHON=(3\.\d+)", dockerfile, re.MULTILINE)[1] == matrix()[-1]["python"]


def tracked(pattern: str) -> set[Path]:
    folders = ("src", "tests", "tools", "benchmarks", "examples", "csrc", "docs")
    files = {path for folder in folders for path in (ROOT / folder).rglob("*")}
    return {path for path in files if re.search(pattern, path.name)}


def test_the_hooks_format_what_lint_checks() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert lint is not None
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    hooks = {hook["id"]: hook for hook in repo["hooks"]}
    assert hooks.keys() == {"ruff-format", "ruff-check", "clang-format"}
    for hook in hooks.values():
        command = " ".join(w for w in hook["entry"].split() if not w.startswith("-"))
        assert f"$(BIN)/{command}" in lint[1]
    named = re.search(r"^PYTHON_DIRS := (.*)$", makefile, re.MULTILINE)
    assert named is not None
    words = re.sub(r"\$\(wildcard (.*?)\)", r"\1", named[1]).split()
    python = {
        p for p in tracked(r"\.(pyi?|ipynb)$") if str(p.relative_to(ROOT)).startswith(tuple(words))
    }
    native = {
        p for p in tracked(r"\.(cpp|h)$") if p.relative_to(ROOT).parts[0] in {"csrc", "tests"}
    }
    assert len(python) > 300
    assert len(native) > 50
    every = tracked(r"\.(pyi?|ipynb|cpp|h)$")
    for name, wanted in {
        "ruff-format": python,
        "ruff-check": python,
        "clang-format": native,
    }.items():
        matches = re.compile(hooks[name]["files"]).search
        assert {p for p in every if matches(p.relative_to(ROOT).as_posix())} == wanted
