import csv
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.report import scalars
from tensorstow.report.scalars import CsvScalars, TensorBoardScalars, WandbScalars


def test_each_scalar_has_a_file_that_is_continued(tmp_path: Path) -> None:
    for step in (8, 16):
        writer = CsvScalars(tmp_path / "job")
        writer.write([("Train/Samples/train loss", 0.5 / step, step), ("lr", 1e-3, step)])
        writer.close()
    assert {path.name for path in (tmp_path / "job").iterdir()} == {
        "Train_Samples_train_loss.csv",
        "lr.csv",
    }
    with (tmp_path / "job/Train_Samples_train_loss.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "train loss"],
            ["8", "0.0625"],
            ["16", "0.03125"],
        ]


# Its own: protobuf and numpy of other versions.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_event_files_are_read_back_by_tensorboard(tmp_path: Path) -> None:
    name = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(name, reason="tensorboard is not installed")
    writer = TensorBoardScalars(tmp_path)
    writer.write([("Train/Samples/train_loss", 0.5, 8)])
    writer.write([("Train/Samples/train_loss", 0.25, 16)])
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()  # written at once, not at the end
    assert [(e.step, e.value) for e in found.Scalars("Train/Samples/train_loss")] == [
        (8, 0.5),
        (16, 0.25),
    ]
    writer.close()
    writer.close()


def test_a_run_of_wandb_is_begun_logged_to_and_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: done.append((values, step)), finish=lambda: done.append("end")
    )

    def init(**given: object) -> object:
        done.append(given)
        return run

    module = types.ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(scalars, "require", lambda _: None)
    writer = WandbScalars("project", group="g", team="t")
    writer.write([("loss", 0.5, 8)])
    writer.close()
    assert done == [
        {"project": "project", "group": "g", "entity": "t"},
        ({"loss": 0.5}, 8),
        "end",
    ]


def test_a_package_that_is_missing_and_a_place_that_cannot_be_are_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="for no_such_package, and the package is not installed"):
        scalars.require("no_such_package")
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match="file/job was requested: Not a directory"):
        CsvScalars(tmp_path / "file" / "job")
