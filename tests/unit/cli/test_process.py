"""Processes of the demo: told and heard by lines, quoted when they fail, never left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorstow.base.errors import StowError
from tensorstow.cli.process import started
from tree import ROOT

EXAMPLES = ROOT / "examples"


def test_one_that_fails_is_quoted() -> None:
    with (
        started("a row", "demo.worker", ["--row", "swim"], EXAMPLES) as process,
        pytest.raises(StowError, match="invalid choice: 'swim'") as caught,
    ):
        list(process.messages())
    assert "'a row' ended with exit status 2. It said last:" in str(caught.value)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "python"
    path.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def test_one_that_is_killed_is_named(script: Path) -> None:
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    with (
        started("a row", "demo.worker", [], EXAMPLES) as process,
        pytest.raises(StowError, match=r"signal 9 \(.*too little memory\)\. It said nothing"),
    ):
        list(process.messages())


def test_one_that_ended_may_be_told_more(script: Path) -> None:
    script.write_text("#!/bin/sh\nexec <&-\nsleep 0.05\n")
    with started("a row", "demo.worker", [], EXAMPLES) as process:
        assert list(process.messages()) == []
        process.tell("2")
        process.tell_no_more()


@pytest.fixture
def children(script: Path) -> Iterator[Callable[[], set[str]]]:
    """A function that names the children of this process; after the test there are no more."""
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    if not path.exists():
        pytest.skip("this kernel does not list children")
    before = set(path.read_text().split())  # other tests' ranks
    yield lambda: set(path.read_text().split()) - before
    assert set(path.read_text().split()) <= before


def test_an_interrupt_leaves_no_process(children: Callable[[], set[str]]) -> None:
    def interrupted() -> None:
        with started("a row", "demo.worker", [], EXAMPLES):
            assert children()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_an_interrupt_while_it_is_started_leaves_no_process(
    children: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Popen itself forgets a process that it has started if a signal's handler raises there."""
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_and_interrupt(*arguments: object) -> None:
        execute(*arguments)
        assert children()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", execute_and_interrupt)
    # A job that a shell puts in the background ignores interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            started("a row", "demo.worker", [], EXAMPLES),
        ):
            pytest.fail("the interrupt is raised before the block runs")
    finally:
        signal.signal(signal.SIGINT, before)
