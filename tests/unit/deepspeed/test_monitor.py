import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow.deepspeed as deepspeed
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.config.settings import MonitorFiles
from tensorstow.deepspeed.monitor import Monitor
from tensorstow.report import scalars


def config(**sections: object) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **sections,
    }


def test_the_sections_are_read_with_upstreams_defaults() -> None:
    settings = read_settings(config(tensorboard={"enabled": True}, wandb={"team": "t"}), 1)
    assert settings.tensorboard == MonitorFiles(enabled=True)
    assert (settings.wandb.enabled, settings.wandb.team, settings.wandb.project) == (
        False,
        "t",
        "deepspeed",
    )
    with pytest.raises(OptionError, match="comet was switched on"):
        read_settings(config(comet={"enabled": True}), 1)


def test_an_engine_writes_loss_and_rate_of_each_step(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(csv_monitor=section)
    )
    losses = []
    for _ in range(4):
        loss = engine(torch.randn(4, 3)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.destroy()

    def read(name: str) -> list[list[str]]:
        with (tmp_path / "job" / f"Train_Samples_{name}.csv").open(newline="") as file:
            return list(csv.reader(file))

    heading, first, second = read("train_loss")
    assert heading == ["step", "train_loss"]
    assert [first[0], second[0]] == ["8", "16"]
    assert float(first[1]) == pytest.approx(sum(losses[:2]) / 2)
    assert float(second[1]) == pytest.approx(sum(losses[2:]) / 2)
    assert read("lr") == [["step", "lr"], ["8", "0.01"], ["16", "0.01"]]


def test_only_the_first_rank_writes_and_all_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    monitor = Monitor(read_settings(config(csv_monitor=section), 1), writes=False)
    assert not monitor.enabled
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(scalars.importlib.util, "find_spec", lambda _: None)
    for name in ("tensorboard", "wandb"):
        settings = read_settings(config(**{name: {"enabled": True}}), 1)
        with pytest.raises(OptionError, match=f"`pip install {name}`"):
            Monitor(settings, writes=False)


def test_without_a_place_files_go_to_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monitor = Monitor(read_settings(config(csv_monitor={"enabled": True}), 1), writes=True)
    monitor.write_events([("Train/Samples/lr", 0.5, 1)])
    monitor.close()
    assert not monitor.enabled
    assert (tmp_path / "csv_monitor/DeepSpeedJobName/Train_Samples_lr.csv").exists()
