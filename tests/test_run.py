import argparse
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from demo_results import make_results, spoil
from tensorstow.base.errors import DirectoryError, OptionError, StowError
from tensorstow.cli.demo import run
from tensorstow.cli.demo.rows import ROWS


def options(out: Path, **changes: object) -> argparse.Namespace:
    given = {"directory": str(out.parent), "out": out, "steps": 3, "small": True}
    return argparse.Namespace(**{**given, **changes})


@pytest.mark.parametrize(("spoiled", "status"), [(None, 0), ("half", 1)])
def test_the_exit_status_says_whether_rows_are_equal(
    spoiled: str | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = make_results()
    if spoiled is not None:
        results = spoil(results, spoiled, checksum="0" * 64)
    monkeypatch.setattr(run, "_run_rows", lambda *_: results)
    assert run.run(options(tmp_path / "out")) == status


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_are_refused(steps: int, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"--steps {steps} was given"):
        run.run(options(tmp_path / "out", steps=steps))
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    with pytest.raises(StowError, match=r'needs matplotlib.*pip install "tensorstow\[demo\]"$'):
        run.run(options(tmp_path / "out"))


def test_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(StowError, match=r"--out .*out was given: no file can be made there"):
        run.run(options(tmp_path / "out"))


def test_a_directory_in_memory_is_refused(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    with pytest.raises(DirectoryError, match="stays in RAM"):
        run.run(options(tmp_path / "out", directory="/dev/shm"))


def test_a_row_that_fails_is_quoted(tmp_path: Path) -> None:
    missing = str(tmp_path / "gone")
    with pytest.raises(StowError, match="does not exist") as caught:
        run.run_row(ROWS[-1], options(tmp_path), missing, lambda _step, _part: None)
    assert "'tensorstow, 100% disk' ended with exit status 1" in str(caught.value)


def test_a_row_that_is_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(StowError, match=r"signal 9 \(.*too little memory\)\. It said nothing"):
        run.run_row(ROWS[0], options(tmp_path), str(tmp_path), lambda _step, _part: None)


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    def interrupt(_step: int, _part: str) -> None:
        raise KeyboardInterrupt

    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text().split() if children.exists() else []  # other tests' ranks
    with pytest.raises(KeyboardInterrupt):
        run.run_row(ROWS[0], options(tmp_path), str(tmp_path), interrupt)
    if children.exists():
        assert set(children.read_text().split()) <= set(before)
