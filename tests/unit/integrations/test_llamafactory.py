"""LLaMA-Factory's registry of optimizers and its arguments, with our optimizer."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainers
from tensorstow import AdamW
from tensorstow.base.errors import OptionError


@pytest.fixture(scope="module")
def factory() -> Any:  # noqa: ANN401
    pytest.importorskip("llamafactory", reason="set-up could not install it")
    from llamafactory.v1.config.training_args import TrainingArguments  # noqa: PLC0415  # seconds
    from llamafactory.v1.plugins.trainer_plugins.optimizer import (  # noqa: PLC0415
        OptimizerPlugin,
    )

    import tensorstow.integrations.llamafactory as ours  # noqa: PLC0415

    return SimpleNamespace(arguments=TrainingArguments, plugin=OptimizerPlugin, ours=ours)


def train(model: torch.nn.Module, optimizer: AdamW) -> list[bytes]:
    for batch in trainers.micro_batches(3):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    return trainers.bits(model)


def test_the_configuration_of_the_guide(factory: Any, tmp_path: Path) -> None:  # noqa: ANN401
    found = trainers.yaml_of_guide("LLaMA-Factory", tmp_path)
    config = factory.arguments(output_dir=str(tmp_path), **found).optim_config
    model = trainers.model()
    optimizer = factory.plugin(config.name)(model, config)
    assert (optimizer.placement_of_states, optimizer.param_groups[0]["lr"]) == ("disk", 1e-4)
    other = trainers.model()
    assert train(model, optimizer) == train(other, AdamW(other.parameters(), lr=1e-4))
    reference = optimizer.state_dict()
    assert reference["state"] == {}
    assert reference["tensorstow"]["step"] == 3
    optimizer.close()


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        ({}, 1, "without lr"),
        ({"lr": 1.0, "overlap": "backward"}, 1, "norm of all gradients"),
        ({"lr": 1.0, "dir": "/nvme"}, 2, "for 2 processes"),
    ],
)
def test_what_would_go_wrong_is_refused(
    factory: Any,  # noqa: ANN401
    config: dict[str, Any],
    world: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(factory.ours.dist, "is_initialized", lambda: world > 1)
    monkeypatch.setattr(factory.ours.dist, "get_world_size", lambda: world)
    with pytest.raises(OptionError, match=message):
        factory.plugin("tensorstow")(torch.nn.Linear(2, 2), {"name": "tensorstow", **config})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: command"),
        (["help"], "'help' is none of sft, train, rm, and no YAML file"),
        (["chat", "run.yaml"], "'chat' is none of sft, train, rm"),
        (["sft"], "sft needs a YAML file or options"),
        (["--model"], "arguments are required: command"),
        (["sft", "missing.yaml"], "missing.yaml is not a file"),
        (["missing.yaml"], "missing.yaml is not a file"),
        (["sft", "/dev/zero"], "/dev/zero is not a file"),
    ],
)
def test_a_command_line_without_training_ends_by_one_line(
    factory: Any,  # noqa: ANN401
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["llamafactory", *arguments])
    with pytest.raises(SystemExit) as ended:
        factory.ours.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
