"""The command from end to end, on the toy model and the real disk."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from demo.configurations import CONFIGURATIONS
from demo.events import LANES
from tree import ROOT


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, str(ROOT / "examples" / "demo"), "--small"]
    done = subprocess.run(
        [*command, "--directory", str(folder), "--out", "kept"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return folder, done.stdout


pytestmark = pytest.mark.timeout(600)


def test_our_rows_are_bitwise_equal(demo: tuple[Path, str]) -> None:
    _, printed = demo
    assert "All 7 tensorstow configurations are bitwise equal" in printed
    cells = re.search(r"hash of weights(.*)", printed)
    assert cells
    torch, *ours = cells[1].split()
    assert len(torch) == 8
    assert len(ours) == 7
    assert len(set(ours)) == 1


def test_the_table_has_every_figure(demo: tuple[Path, str]) -> None:
    _, printed = demo
    for label in (
        "loss, step 4",
        "first step",
        "steady step",
        "peak RSS",
        "RSS at the end",
        "on disk, predicted",
    ):
        line = next(line for line in printed.splitlines() if label in line)
        assert len(line.replace(label, "").split()) == len(CONFIGURATIONS)


def test_predicted_bytes_are_the_measured_ones(demo: tuple[Path, str]) -> None:
    _, printed = demo
    for place in ("in RAM", "on disk", "buffers"):
        predicted, measured = (
            re.findall(rf"{place}, {word} +(.*)", printed) for word in ("predicted", "measured")
        )
        assert predicted
        *predicted, stow = predicted[0].split()
        assert predicted == measured[0].split()[:-1]
        assert stow == "\N{EN DASH}"


def test_a_run_was_killed_and_ended_with_the_same_hash(demo: tuple[Path, str]) -> None:
    _, printed = demo
    said = " ".join(printed.split())
    assert re.search(
        r"killed \(kill -9\) in the update of step 2 and went on from its commit of step 1: after"
        r" step 2 the hash of its parameters is [0-9a-f]{8}, that of the run which was never",
        said,
    )
    assert re.search(r"differs by at most [0-9.]+ ULP", said)


def test_pictures_are_large_pngs(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    for name in ("timeline.png", "memory.png"):
        picture = (folder / "kept" / name).read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">I", picture[16:20])[0] >= 1600


def test_the_report_needs_no_network(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    page = (folder / "kept" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://", page)
    assert "bitwise equal" in page


def test_the_event_log_has_every_lane(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    log = json.loads((folder / "kept" / "events.json").read_text(encoding="utf-8"))
    for pid, row in enumerate(CONFIGURATIONS):
        lanes = {e["cat"] for e in log["traceEvents"] if e["pid"] == pid and "cat" in e}
        assert lanes >= ({*LANES} - {"read"} if row.is_offloaded else {"compute"})
        assert row.schedule != "naive" or "read" in lanes


def test_it_ends_with_what_to_type_and_leaves_nothing_else(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    assert 'states="disk"' in printed
    assert "kept/report.html" in printed.split("Written:")[1]
    assert [entry.name for entry in folder.iterdir()] == ["kept"]
    names = {entry.name for entry in (folder / "kept").iterdir()}
    assert names == {"timeline.png", "memory.png", "report.html", "events.json"}


def test_the_lines_to_type_are_python(demo: tuple[Path, str]) -> None:
    _, printed = demo
    lines = printed.split("In your own script:")[1].split("Written:")[0]
    compile("if True:\n    pass\n" + lines, "lines", "exec")
