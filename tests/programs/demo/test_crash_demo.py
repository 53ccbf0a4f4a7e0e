"""The run of the demo that is killed: where it lies, and that nothing of it stays."""

from pathlib import Path

import pytest

from demo import crash
from demo.configurations import SMALL
from tensorstow.base.errors import DirectoryError, StowError
from tensorstow.cli.process import kill_in_an_update


def test_it_lies_in_out_where_that_can_hold_it(tmp_path: Path) -> None:
    (tmp_path / "out" / "killed-run").mkdir(parents=True)
    (tmp_path / "out" / "killed-run" / "left over").touch()
    made = crash._make_directory(tmp_path / "out", tmp_path, SMALL)
    assert made == tmp_path / "out" / "killed-run"
    assert list(made.iterdir()) == []


def test_it_lies_beside_the_scratch_files_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _needed: int) -> None:
        raise DirectoryError

    monkeypatch.setattr(crash, "check_directory", refuse)
    made = crash._make_directory(tmp_path / "out", tmp_path, SMALL)
    assert made.parent == tmp_path
    assert made.name.startswith("tensorstow-demo-")


def test_nothing_stays_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        assert (tmp_path / "killed-run").is_dir()
        raise StowError

    monkeypatch.setattr(crash, "started", fail)
    with pytest.raises(StowError):
        crash.kill_and_resume(tmp_path, tmp_path, SMALL, small=True, tell=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_not_killed_is_an_error() -> None:
    class Early:
        name = crash.NAME

        def messages(self) -> list[dict[str, object]]:
            return [{"step": 0, "part": "opt.step"}]

    with pytest.raises(StowError, match="ended by itself"):
        kill_in_an_update(Early(), crash.COMMITTED, lambda *_: None)
