"""What a person fills in before the first release is listed in one place, CONTRIBUTING.md."""

import re
import subprocess
import tomllib
from typing import Any

import pytest
import yaml

from tensorstow.cli.main import make_parser
from tree import ROOT

URLS = {"Homepage", "Documentation", "Source", "Issues", "Changelog"}


def listed(word: str) -> set[str]:
    """Return the files that the list names for a placeholder."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition("## Before the first release\n")[2].partition("\n## ")[0]
    item = re.search(rf"^\* `?{word}.*?(?=^\* |\Z)", section, re.MULTILINE | re.DOTALL)
    assert item is not None
    return set(re.findall(r"`([\w./-]+\.\w+)`", item[0].partition(": ")[2]))


def holding(pattern: str) -> set[str]:
    """Return the files in which a pattern occurs, apart from tests and CONTRIBUTING.md."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    skipped = ("tests/", "CONTRIBUTING.md")
    files = [ROOT / name for name in names if not name.startswith(skipped)]
    found = set()
    for file in files:
        if file.is_file() and file.suffix not in {".png", ".svg"}:
            text = file.read_text("utf-8", errors="replace")
            if re.search(pattern, text):
                found.add(str(file.relative_to(ROOT)))
    return found


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source archive: no list of files")
@pytest.mark.parametrize(
    ("word", "pattern"),
    [
        ("OWNER", r"\bOWNER\b"),
        ("CONTACT", r"\bCONTACT\b"),
        ("Names of authors", r"The tensorstow authors"),
    ],
)
def test_each_placeholder_is_listed_with_its_files(word: str, pattern: str) -> None:
    assert listed(word) == holding(pattern)


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def test_the_project_has_addresses_authors_and_words_that_a_search_finds() -> None:
    assert project()["urls"].keys() == URLS
    assert all(re.fullmatch(r"https://[\w./-]+", url) for url in project()["urls"].values())
    assert project()["authors"]
    wanted = {"pytorch", "offload", "fine-tuning", "lora", "deepspeed", "out of memory", "llm"}
    assert wanted <= set(project()["keywords"])


def test_the_citation_can_be_read() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    needed = {"cff-version", "message", "title", "authors"}  # by the format's schema
    assert needed <= citation.keys()
    assert citation["license"] == project()["license"]
    assert citation["repository-code"] == project()["urls"]["Source"]
    assert citation["authors"] == project()["authors"]


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_the_forms_of_issues_can_be_read(name: str) -> None:
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text("utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["type"] in {"textarea", "input", "markdown"} for field in form["body"])
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_a_report_of_a_bug_has_what_doctor_prints() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text("utf-8"))
    (machine,) = [field for field in form["body"] if field["id"] == "machine"]
    command = re.search(r"`tensorstow (.*?)`", machine["attributes"]["label"])
    assert command is not None
    assert make_parser().parse_args(command[1].split()).json
    assert machine["validations"]["required"]
    assert machine["attributes"]["render"] == "json"


def test_a_vulnerability_is_not_reported_as_an_issue() -> None:
    config = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/config.yml").read_text("utf-8"))
    (link,) = config["contact_links"]
    assert link["url"] in (ROOT / "SECURITY.md").read_text("utf-8")


def test_the_policy_names_tests_and_files_that_are_there() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    names = re.findall(r"`(tests/[\w./]+)`", text)
    assert len(names) >= 2
    assert all((ROOT / name).exists() for name in names)
