"""A pytest plugin (``-p unskipped``): a test that is skipped fails the run.

On a machine that has what the tests need, a skip means that something was not tested. These skips
alone are right there: of tests of the simulated accelerator, of those that need more devices, and
on another kind of device of those that need CUDA, which ask for nothing else.
"""

import re

import pytest

_RIGHT = re.compile(r"the simulated accelerator|needs \d+ accelerators|needs CUDA itself")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that hears of all tests
        config.pluginmanager.register(_Skips())


class _Skips:
    """Counts what was skipped and should not have been."""

    def __init__(self) -> None:
        self._wrong: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):  # which is said to be skipped too
            self._hear(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._hear(report)

    def _hear(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if not _RIGHT.search(why):
                self._wrong.append(f"{report.nodeid}: {why}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._wrong and session.exitstatus in {
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        }:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._wrong:
            terminalreporter.write_line(f"NOT TESTED {line}")
