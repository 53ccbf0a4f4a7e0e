import io
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from demo import worker
from demo.configurations import CONFIGURATIONS, SMALL, Configuration
from demo.result import RunResult
from demo.training import make_model
from spacings import P_SPACINGS
from tensorstow.report import rss
from tensorstow.report.spans import TimeSpan


@pytest.fixture(autouse=True)
def _keep_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run_main(key: str, directory: Path, orders: str = "2\n") -> list[str]:
    with tempfile.TemporaryFile("w+") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(orders))
        arguments = ["--row", key, "--directory", str(directory), "--small"]
        worker.main([*arguments, "--descriptor", str(os.dup(file.fileno()))])
        file.seek(0)
        return file.read().splitlines()


def test_it_tells_its_progress_and_then_its_result(tmp_path: Path) -> None:
    *progress, last = run_main("full", tmp_path)
    said = [json.loads(line) for line in progress]
    assert said[0] == {"step": -1, "part": "build"}
    assert [s["step"] for s in said if s.get("part") == "opt.step"] == [0, 1]
    assert [s["waits"] for s in said if "waits" in s] == [0, 2]
    result = RunResult.of(json.loads(last))
    assert result.key == "full"
    assert len(result.losses) == 2
    assert {span.lane for span in result.spans} >= {"compute", "update", "write"}
    # The first step has nothing to read; the second finds all of the toy's states in the ring.
    file_bytes = result.measured.file_bytes
    assert 0 < file_bytes < result.measured.ring_bytes
    assert result.bytes_written == 2 * file_bytes
    assert (result.bytes_read, result.bytes_spared) == (0, file_bytes)


def test_the_naive_row_reads_what_it_wrote(tmp_path: Path) -> None:
    *_, last = run_main("naive", tmp_path)
    result = RunResult.of(json.loads(last))
    assert {span.lane for span in result.spans} >= {"compute", "read", "update", "write"}
    assert result.bytes_written == 2 * result.bytes_read == 2 * result.measured.file_bytes
    assert result.bytes_spared == 0


@pytest.mark.usefixtures("garbage_apart")
@pytest.mark.parametrize("row", CONFIGURATIONS, ids=lambda row: row.key)
def test_what_is_held_is_what_was_predicted(row: Configuration, tmp_path: Path) -> None:
    before = worker.unlinked_file_bytes(str(tmp_path))
    result = worker.run_row(row, SMALL, [2], str(tmp_path), lambda _step, _part: None)
    measured = replace(result.measured, gradient_bytes=0)  # not of states
    assert result.predicted == (None if row.optimizer == "stow" else measured)
    assert result.parameters == SMALL.parameters
    assert result.peak_rss_bytes >= result.end_rss_bytes > 0
    slack = 2 * 4096  # the filesystem's own block or two
    files = result.allocated_file_bytes - (before if row.is_offloaded else 0)
    weights = files - result.measured.file_bytes
    if row.optimizer == "stow":
        assert 0 <= weights - 4 * SMALL.parameters <= 16 * slack
    else:
        assert 0 <= weights <= slack


@pytest.fixture(scope="module")
def in_two_turns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    threads = torch.get_num_threads()
    directory = str(tmp_path_factory.mktemp("scratch"))
    rows = [row for row in CONFIGURATIONS if row.key in {"ram", "forward", "stow"}]
    try:
        return {
            row.key: worker.run_row(row, SMALL, [2, 2], directory, lambda _step, _part: None)
            for row in rows
        }
    finally:
        torch.set_num_threads(threads)


def test_turns_do_not_change_what_is_computed(
    in_two_turns: dict[str, RunResult], tmp_path: Path
) -> None:
    whole = worker.run_row(CONFIGURATIONS[4], SMALL, [4], str(tmp_path), lambda _step, _part: None)
    for result in in_two_turns.values():
        assert (result.losses, result.checksum) == (whole.losses, whole.checksum)
        assert result.turns == (2, 2)


def test_the_anchor_says_what_it_was_after_each_turn_and_how_far_torch_is(
    in_two_turns: dict[str, RunResult],
) -> None:
    anchor = in_two_turns["ram"]
    assert len(set(anchor.checksums)) == 2
    assert anchor.checksums[-1] == anchor.checksum
    assert anchor.from_torch is not None
    assert 0 < anchor.from_torch.ulps <= P_SPACINGS
    assert 0 < anchor.from_torch.share < 1
    assert in_two_turns["forward"].from_torch is None


def test_a_turn_ends_with_nothing_under_way(in_two_turns: dict[str, RunResult]) -> None:
    spans = in_two_turns["forward"].spans
    first = next(s for s in spans if s.name == "last writes")
    later = [s for s in spans if s.lane in {"read", "update", "write"} and s.start >= first.stop]
    assert later  # of the second turn
    assert all(s.stop <= first.stop or s.start >= first.stop for s in spans)


def test_turns_between_two_samples_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rss, "SAMPLES_PER_SECOND", 0.001)
    result = worker.run_row(
        CONFIGURATIONS[1], SMALL, [1, 1], str(tmp_path), lambda _step, _part: None
    )
    assert len(result.rss) >= 4
    assert sorted(sample.time for sample in result.rss) == [sample.time for sample in result.rss]


def test_time_between_turns_is_taken_out() -> None:
    turns = worker.TurnClock([(10.0, 12.0), (100.0, 103.0)])
    assert [turns.moment(t) for t in (9.0, 10.5, 50.0, 101.0)] == [None, 0.5, None, 3.0]
    cut = turns.cut(TimeSpan("read", "read", 11.0, 101.0))
    assert (cut.start, cut.stop) == (1.0, 3.0)
    between = turns.cut(TimeSpan("read", "read", 50.0, 100.5))
    assert (between.start, between.stop) == (2.0, 2.5)


def test_the_naive_row_holds_one_chunk() -> None:
    model = make_model(SMALL)
    naive, full = (worker.predict(CONFIGURATIONS[i], SMALL, model) for i in (2, 4))
    assert 0 < naive.ring_bytes < full.ring_bytes
    assert naive.disk_bytes == full.disk_bytes == 8 * SMALL.parameters


def test_files_without_a_name_are_counted(tmp_path: Path) -> None:
    before = worker.unlinked_file_bytes(str(tmp_path))
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        assert worker.unlinked_file_bytes(str(tmp_path)) - before >= 1 << 20
