"""tools/accelerator.sh, rehearsed on the simulated accelerator; what it does on a real one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tree import ROOT

SCRIPT = ROOT / "tools" / "accelerator.sh"
REHEARSED = ["build", "tests", "parity", "overlap", "bench-1B", "sanitize"]
SELECTED = "-k 'copies_there_and_back or goes_from_device_to_host'"


def call(
    folder: Path, *stages: str, path: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    given = {
        "SIMULATED": "1",
        "ACCELERATOR_STATE": str(folder / "state"),
        "ACCELERATOR_PYTHON": sys.executable,
        "OUT": str(folder / "out"),
        "TEST_PROCESSES": "0",
        "PYTEST_ADDOPTS": SELECTED,
        "SIMULATED_COPY_US": "50",
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment["PATH"] = f"{path}{environment['PATH']}"
    return subprocess.run(
        [SCRIPT, *stages],
        env={**environment, **given, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def results(folder: Path) -> dict[str, str]:
    saved = json.loads((folder / "out" / "stages.json").read_text())
    return {stage["stage"]: stage["result"] for stage in saved["stages"]}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_rehearsal_leaves_figures_and_is_not_repeated(tmp_path: Path) -> None:
    sanitizer = tmp_path / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text('#!/bin/sh\nshift 4\nexec "$@"\n')  # its options, then the command
    sanitizer.chmod(0o755)
    done = call(tmp_path, *REHEARSED, path=f"{sanitizer.parent}:")
    assert done.returncode == 0, done.stderr
    assert results(tmp_path) == dict.fromkeys(REHEARSED, "done")
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {"stages.json", "table.md", "gpu.json", "gpu_overlap.json", "results.tar.gz"}
    figures = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert figures["machine"]["accelerator"] == "simulated"
    measured = {figure["name"]: figure["measured"] for figure in figures["figures"]}
    asked = [value for name, value in measured.items() if "throughput / no offload" in name]
    assert sum(value is not None for value in asked) >= 8  # seven of ours, FSDP2
    assert "| bench-1B | done |" in (tmp_path / "out" / "table.md").read_text()
    tests = (tmp_path / "state-simulated").glob("tests-*.jsonl")
    (passed,) = [json.loads(line) for path in tests for line in path.read_text().split("\n")[1::2]]
    assert passed["outcome"] == "passed"
    # The second call has a Python that can do nothing.
    done = call(tmp_path, *REHEARSED, ACCELERATOR_PYTHON="/bin/false")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("done before") == len(REHEARSED)


@pytest.mark.soak
def test_a_trace_of_each_way_is_made_once(tmp_path: Path) -> None:
    done = call(tmp_path, "traces")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "traces.tar").stat().st_size > 0
    (folder,) = (tmp_path / "state-simulated").glob("traces-*")
    made = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json.gz")}
    assert len(made) >= 7  # compute alone, no offload, four of ours, FSDP2
    (tmp_path / "state-simulated" / "traces.done").unlink()
    gone = folder / next(iter(made))
    gone.unlink()
    done = call(tmp_path, "traces")
    assert done.returncode == 0, done.stderr
    again = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json.gz")}
    assert again.keys() == made.keys()
    assert {name for name in made if made[name] != again[name]} == {gone.name}


def test_a_failure_is_said_and_the_next_stage_runs(tmp_path: Path) -> None:
    done = call(tmp_path, "tests", "bench-8B", "sanitize", ACCELERATOR_PYTHON="/bin/false")
    assert done.returncode == 1
    assert "not done: tests bench-8B" in done.stderr
    assert results(tmp_path) == {
        "tests": "failed, status 1",
        "bench-8B": "failed, status 1",
        "sanitize": "not here",
    }


def test_a_stage_that_takes_too_long_is_cut_off_and_later_ones_have_no_time(
    tmp_path: Path,
) -> None:
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\nsleep 600\n")
    endless.chmod(0o755)
    python = {"ACCELERATOR_PYTHON": str(endless), "ACCELERATOR_SECONDS": "11"}
    done = call(tmp_path, "tests", "parity", **python)
    assert done.returncode == 1
    found = results(tmp_path)
    assert found["tests"].startswith("cut off after 1")
    assert found["parity"] == "no time left"


def test_a_stage_that_there_is_not_is_refused(tmp_path: Path) -> None:
    done = call(tmp_path, "test")
    assert done.returncode == 2
    assert "no stage test; there are: build tests" in done.stderr


def test_nothing_runs_where_torch_sees_no_accelerator(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    done = call(tmp_path, "tests", "sanitize", "bench-1B", SIMULATED="")
    assert done.returncode == 2
    assert "no accelerator" in done.stderr
    assert not [*tmp_path.rglob("*.done"), *tmp_path.rglob("*.result")]


def test_what_another_kind_of_device_did_is_not_done(tmp_path: Path) -> None:
    """Nor what a rehearsal did, even where its results were unpacked among real ones."""
    good = tmp_path / "python"
    good.write_text('#!/bin/sh\necho "$FOUND, torch 2"\n')  # to whatever it is asked
    good.chmod(0o755)

    def called(**variables: str) -> tuple[bool, list[object]]:
        done = call(tmp_path, "parity", ACCELERATOR_PYTHON=str(good), **variables)
        assert done.returncode == 0, done.stderr
        saved = json.loads((tmp_path / "out" / "stages.json").read_text())
        found = [saved["simulated"], *(stage["device"] for stage in saved["stages"])]
        return "done before" in done.stderr, found

    assert called(SIMULATED="1") == (False, [True, "simulated"])
    assert called(SIMULATED="1") == (True, [True, "simulated"])
    shutil.copytree(tmp_path / "state-simulated", tmp_path / "state")
    for device in ("H100", "H200"):
        real = {"SIMULATED": "", "FOUND": device}
        assert called(**real) == (False, [False, f"{device}, torch 2"])
        assert called(**real) == (True, [False, f"{device}, torch 2"])


# --- the plugins that keep results and that forbid skips ---

TESTS = """
import os
import pytest

@pytest.mark.parametrize("i", range(4))
def test_good(i): pass

def test_bad(): assert "MENDED" in os.environ

@pytest.fixture
def late():
    yield
    assert "MENDED" in os.environ

def test_ends_badly(late): pass
"""


@pytest.mark.parametrize("processes", ["0", pytest.param("2", marks=pytest.mark.soak)])
def test_what_has_passed_is_not_run_again(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    kept = tmp_path / "kept.jsonl"

    def run(**variables: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "resumed", "-n", processes]
        command += ["--results", str(kept), "-c", "/dev/null", "--rootdir", str(tmp_path)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        done = subprocess.run(
            [*command, str(tmp_path / "test_some.py")],
            env={**environment, "PYTHONPATH": str(ROOT / "tests"), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    status, printed = run()
    assert status == 1, printed
    assert "5 passed" in printed
    found = [json.loads(line) for line in kept.read_text().splitlines() if line]
    why = {result["test"].split("::")[1]: result["why"] for result in found}
    assert why["test_good[0]"] == ""
    assert '"MENDED" in os.environ' in why["test_bad"]
    assert '"MENDED" in os.environ' in why["test_ends_badly"]
    with kept.open("a") as file:
        file.write('\n{"test": "cut o')
    status, printed = run(MENDED="1")
    assert status == 0, printed
    assert "2 passed" in printed
    status, printed = run()
    assert status == 0, printed
    assert "passed" not in printed


NEEDS_CUDA = """
import pytest
@pytest.mark.parametrize("i", range({}))
def test_a(i): pytest.skip("needs CUDA itself")
"""
SKIPPED = {
    "no device": (1, "import pytest\ndef test_a(): pytest.skip('torch.accelerator has no device')"),
    "no module": (1, "import pytest\npytest.importorskip('that_there_is_not')\ndef test_a(): pass"),
    "simulated": (0, "import pytest\ndef test_a(): pytest.skip('about the simulated accelerator')"),
    "ranks": (0, "import pytest\ndef test_a(): pytest.skip('needs 2 accelerators')"),
    "CUDA": (0, "import pytest\npytest.skip('needs CUDA itself', allow_module_level=True)"),
    "CUDA, 6": (1, NEEDS_CUDA.format(6)),
    "expected": (0, "import pytest\n@pytest.mark.xfail\ndef test_a(): raise ValueError"),
}


@pytest.mark.parametrize("processes", ["0", "1"])
@pytest.mark.parametrize("kind", SKIPPED)
def test_a_test_that_is_skipped_was_not_tested(tmp_path: Path, kind: str, processes: str) -> None:
    status, text = SKIPPED[kind]
    done = run_without_skips(tmp_path, text, processes)
    assert done.returncode == status, done.stdout
    assert ("NOT TESTED" in done.stdout) == bool(status)


@pytest.mark.parametrize(("kind", "status"), [("simulated", 1), ("ranks", 1), ("CUDA", 0)])
def test_on_the_simulated_accelerator_only_cuda_is_not_tested(
    tmp_path: Path, kind: str, status: int
) -> None:
    (tmp_path / "simulated.py").write_text("")
    done = run_without_skips(tmp_path, SKIPPED[kind][1], "0", "-p", "simulated")
    assert done.returncode == status, done.stdout


def run_without_skips(
    folder: Path, text: str, processes: str, *more: str
) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(text)
    (folder / "test_good.py").write_text("def test_good(): pass")
    command = [sys.executable, "-m", "pytest", "-q", *more, "-p", "unskipped", "-n", processes]
    paths = os.pathsep.join([str(folder), str(ROOT / "tests")])
    return subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", str(folder), str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
