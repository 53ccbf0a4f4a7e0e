"""A pytest plugin (``-p unskipped``): a test that is skipped fails the run.

On a machine that has what the tests need, a skip means that something was not tested. These skips
alone are right there: of tests of the simulated accelerator, of those that need more devices, and
on another kind of device of those that need CUDA, which ask for nothing else. With the simulated
accelerator only the last are right, and no more than ``MOST``: all others can be tested on it.
"""

import re
import sys

import pytest

MOST = 5
"""Files or tests that may be skipped because they need CUDA itself."""
_NEEDS_CUDA = re.compile(r"needs CUDA itself")
_RIGHT_ELSEWHERE = re.compile(r"the simulated accelerator|needs \d+ accelerators")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that hears of all tests
        config.pluginmanager.register(_Skips())


class _Skips:
    """Counts what was skipped and should not have been."""

    def __init__(self) -> None:
        self._wrong: list[str] = []
        self._need_cuda: dict[str, None] = {}  # each process that collects tells of a whole file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):  # which is said to be skipped too
            self._hear(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._hear(report)

    def _hear(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if _NEEDS_CUDA.search(why):
                self._need_cuda[report.nodeid] = None
            elif "simulated" in sys.modules or not _RIGHT_ELSEWHERE.search(why):
                self._wrong.append(f"{report.nodeid}: {why}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if len(self._need_cuda) > MOST:
            self._wrong += [f"{name}: one of more than {MOST}" for name in self._need_cuda]
        if self._wrong and session.exitstatus in {
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        }:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._wrong:
            terminalreporter.write_line(f"NOT TESTED {line}")
