import json
import os
import tempfile
from pathlib import Path

import pytest
import torch

from tensorstow.cli.demo import child
from tensorstow.cli.demo.result import RowResult
from tensorstow.cli.demo.rows import ROWS, SMALL
from tensorstow.cli.demo.training import make_model


@pytest.fixture(autouse=True)
def _keep_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run_main(key: str, directory: Path) -> list[str]:
    with tempfile.TemporaryFile("w+") as file:
        arguments = ["--row", key, "--steps", "2", "--directory", str(directory), "--small"]
        child.main([*arguments, "--descriptor", str(os.dup(file.fileno()))])
        file.seek(0)
        return file.read().splitlines()


def test_it_tells_its_progress_and_then_its_result(tmp_path: Path) -> None:
    *progress, last = run_main("full", tmp_path)
    said = [json.loads(line) for line in progress]
    assert said[0] == {"step": -1, "part": "build"}
    assert [s["step"] for s in said if s["part"] == "opt.step"] == [0, 1]
    result = RowResult.from_json(last)
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
    result = RowResult.from_json(last)
    assert {span.lane for span in result.spans} >= {"compute", "read", "update", "write"}
    assert result.bytes_written == 2 * result.bytes_read == 2 * result.measured.file_bytes
    assert result.bytes_spared == 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_what_is_held_is_what_was_predicted(row: object, tmp_path: Path) -> None:
    result = child.run_row(row, SMALL, 2, str(tmp_path), lambda _step, _part: None)
    assert result.measured == result.predicted
    assert result.parameters == SMALL.parameters
    assert result.peak_rss_bytes >= result.end_rss_bytes > 0
    slack = 2 * 4096  # the filesystem's own block or two
    assert 0 <= result.allocated_file_bytes - result.predicted.file_bytes <= slack


def test_the_naive_row_holds_one_chunk() -> None:
    model = make_model(SMALL)
    naive, full = (child.predict(ROWS[i], SMALL, model) for i in (2, 4))
    assert 0 < naive.ring_bytes < full.ring_bytes
    assert naive.disk_bytes == full.disk_bytes == 8 * SMALL.parameters


def test_files_without_a_name_are_counted(tmp_path: Path) -> None:
    before = child.unlinked_file_bytes(str(tmp_path))
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        assert child.unlinked_file_bytes(str(tmp_path)) - before >= 1 << 20
