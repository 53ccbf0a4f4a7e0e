"""A pytest plugin (``-p resumed --results FILE``): what has passed is not run again.

Each test's result is a line of JSON in FILE as soon as it is over, so that a call that is cut off
leaves what it found. Tests that did not pass are run by the next one.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_PASSED = "resumed_passed"
_LONGEST_WHY = 6000
"""Characters of the end of a failure or skip: all that a run that is cut off leaves of it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, required=True, help="file that keeps the results")


def pytest_configure(config: pytest.Config) -> None:
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:  # all workers must select alike, while results are written
        config.stash[_KEY] = set(workerinput[_PASSED])
        return
    config.stash[_KEY] = _read(config.getoption("--results"))
    config.pluginmanager.register(_Results(config.getoption("--results")))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # noqa: ANN401  # xdist's
    node.workerinput[_PASSED] = sorted(node.config.stash[_KEY])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = config.stash[_KEY]
    again = [item for item in items if item.nodeid not in passed]
    if len(again) < len(items):
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid in passed])
        items[:] = again


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash[_KEY]:
        session.exitstatus = pytest.ExitCode.OK  # all passed before


_KEY = pytest.StashKey[set[str]]()


class _Results:
    """Writes, in the process that hears of all tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._why: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.outcome != "passed" or name not in self._outcomes:
            self._outcomes[name] = report.outcome
        if report.outcome != "passed":
            self._why.setdefault(name, report.longreprtext[-_LONGEST_WHY:])
        if report.when == "teardown":
            self._write(name)

    def _write(self, name: str) -> None:
        result: dict[str, str | float] = {"test": name, "outcome": self._outcomes.pop(name)}
        result["why"] = self._why.pop(name, "")
        result["seconds"] = round(self._seconds.pop(name), 3)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(result)}\n")  # the last line may have been cut off


def _read(path: Path) -> set[str]:
    lines: Sequence[str] = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    passed = set()
    for line in lines:
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if result["outcome"] == "passed":
            passed.add(result["test"])
    return passed
