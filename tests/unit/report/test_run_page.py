import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from page_reader import read
from run_records import READ, STEPS, make_record
from tensorstow.base.errors import DirectoryError
from tensorstow.report.run_page import figures_of, page_of, trace_of, write_report
from tensorstow.report.run_record import Compared
from tensorstow.report.spans import Sample, TimeSpan

SPANS = [
    *STEPS,
    TimeSpan(READ, "read", 9.0, 9.5, chunk=3, nbytes=1 << 20),
    TimeSpan("wait", "wait", 9.0, 10.0),
]
HELD = {
    "process": [Sample(0.0, 100 << 20), Sample(5.0, 300 << 20), Sample(10.0, 200 << 20)],
    "disk": [Sample(0.0, 64 << 20), Sample(10.0, 64 << 20)],
}
PLAN = [Compared("HOST", "ring of states", 200, 210), Compared("HOST", "gradients", 50, None)]
RECORD = make_record(SPANS, held=HELD, compared=PLAN)


def text_of(page: str) -> str:
    reader = read(page.replace("<t", " <t"))  # cells are apart
    assert reader.links == []
    assert not re.search(r"https?://", page)
    return " ".join(reader.text.split())


def test_a_page_has_every_section() -> None:
    text = text_of(page_of(RECORD))
    for piece in (
        "a <run>",
        "2 steps in 10 s; 5 s per step (median); 500 ms of a step waiting (10% of the time).",
        "HOST: memory of the process, Python and torch included",
        "peak 300.0 MiB, from 100.0 MiB to 200.0 MiB",
        "DISK: files of states and weights 64.0 MiB throughout",
        "waiting: reads of states 500 ms 10.0% 0 ms 500 ms",
        "read (/nvme) 250 ms 512.0 KiB",
        "states written 4.0 MiB 2.0 MiB",
        "HOST ring of states 200 B 210 B +5.0%",
        "HOST gradients 50 B not measured separately",
        "Each step writes 0.0021 GB to disk",
    ):
        assert piece in text


def test_a_curve_keeps_each_value_until_the_next() -> None:
    (line,) = re.findall(r'<polyline points="([^"]*)"', page_of(RECORD))
    assert line == "0.0,66.67 500.0,66.67 500.0,0.00 1000.0,0.00 1000.0,33.33"


def test_without_a_recording_there_are_totals_and_what_to_do() -> None:
    empty = replace(RECORD, spans=(), held={}, seconds=0.0)
    text = text_of(page_of(empty))
    assert "with optimizer.recording():" in text
    assert "states read 8.0 MiB" in text
    assert "<script" not in page_of(empty)


def test_a_full_log_says_so() -> None:
    assert "The log was full: 1,234 later entries" in page_of(replace(RECORD, dropped=1234))


def test_the_trace_has_a_lane_for_each_and_counters() -> None:
    events = trace_of(RECORD)["traceEvents"]
    lanes = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert lanes == ["compute", "read (/nvme)", "wait"]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"process", "disk"}


def test_figures_are_plain_and_add_up() -> None:
    figures = json.loads(json.dumps(figures_of(RECORD)))
    assert figures["stalls"] == {"reads of states": 0.5, "other": 0.5}
    assert figures["peak_bytes"] == {"process": 300 << 20, "disk": 64 << 20}
    assert figures["plan"][0]["measured"] == 210


def test_files_are_written_and_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    files = write_report(RECORD, tmp_path / "out")
    assert {path.name for path in files.values()} == {"report.html", "trace.json", "report.json"}
    assert json.loads(files["trace"].read_text())["displayTimeUnit"] == "ms"
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match="file was requested: File exists"):
        write_report(RECORD, tmp_path / "file")
