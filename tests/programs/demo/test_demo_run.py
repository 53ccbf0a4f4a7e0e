import argparse
import importlib.util
import json
from pathlib import Path

import pytest
from demo_results import judged, make_results, spoil

from demo import run
from demo.configurations import CONFIGURATIONS
from tensorstow.base.errors import DirectoryError, OptionError, StowError


def options(out: Path, **changes: object) -> argparse.Namespace:
    given = {
        "directory": str(out.parent),
        "out": out,
        "steps": 3,
        "small": True,
        "json": False,
        "gemini": False,
    }
    return argparse.Namespace(**{**given, **changes})


@pytest.mark.parametrize(("spoiled", "status"), [(None, 0), ("half", 1)])
def test_the_exit_status_says_whether_rows_are_equal(
    spoiled: str | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = make_results()
    if spoiled is not None:
        results = spoil(results, spoiled, checksum="0" * 64)
    monkeypatch.setattr(run, "_run_all", lambda *_: (results, judged(results)))
    monkeypatch.setattr(run, "write_files", lambda *_: {})
    assert run.run(options(tmp_path / "out")) == status


@pytest.mark.parametrize("steps", [0, 1, -1])
def test_too_few_steps_are_refused(steps: int, tmp_path: Path) -> None:
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


def test_json_is_all_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = make_results(4)
    monkeypatch.setattr(run, "_run_all", lambda *_: (results, judged(results)))
    assert run.run(options(tmp_path / "out", json=True)) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["is_equal"]
    assert set(facts["rows"]) == {row.key for row in CONFIGURATIONS}
    assert facts["rows"]["full"]["less_bytes_than_torch"] == 30 << 20
    assert facts["parity"]["crash"]["committed"] == 1
    assert {Path(path).name for path in facts["files"].values()} == {
        "report.html", "timeline.png", "memory.png", "events.json"
    }  # fmt: skip
    assert all(Path(path).stat().st_size > 1000 for path in facts["files"].values())
    assert len(facts["sentences"]) == 5


def test_gemini_s_table_makes_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class BeganError(Exception):
        pass

    def begin(*_: object) -> None:
        raise BeganError

    monkeypatch.setattr(run, "_directory", begin)
    with pytest.raises(BeganError):
        run.run(options(tmp_path / "out", gemini=True))
    assert not (tmp_path / "out").exists()
