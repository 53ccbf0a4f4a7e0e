"""The tutorial's model: what it takes at full size, and that it learns at a small one."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from tree import ROOT

FILE = ROOT / "examples" / "deepspeed_zero_offload.py"
PARAMETERS = 50 * (12 * 4096**2 + 13 * 4096) + (50304 + 1024 + 2) * 4096
GIB = 1 << 30


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_zero_offload", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_states_of_ten_billion_parameters_are_in_host_memory(example: ModuleType) -> None:
    held = example.needs(example.parse([]))
    inputs = 50 * 10 * 1024 * 4096 * 2
    in_flight = 256 << 20  # gradients on their way down
    assert held["device"] == 2 * PARAMETERS + in_flight + inputs  # nothing is gathered on one rank
    assert held["device"] < 25 * GIB  # of the tutorial's 32
    # The weights that updates write and gradients, in bf16; moments, and halves of masters.
    staging = 64 << 20  # of gradients that updates on the host read
    assert held["host"] == (2 + 2 + 10) * PARAMETERS + staging
    assert held["disk"] == 0


def test_a_small_one_learns(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(example.CONFIG.read_text())
    config["optimizer"]["params"]["lr"] = 1e-2
    del config["scheduler"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    small = ["--num-layers=2", "--hidden-size=32", "--num-attention-heads=2", "--sequence=16"]
    more = ["--vocabulary=20", "--steps=40", "--batch-size=2", f"--deepspeed_config={file}"]
    losses = example.train(example.parse([*small, *more]))
    assert losses[0] == pytest.approx(math.log(20), rel=0.1)  # it knows nothing, and no wrong
    assert losses[-1] < 0.7 * losses[0]
    assert "step 40: loss" in capsys.readouterr().out


def test_the_tutorials_command_line_is_taken(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--model-parallel-size 1 --num-layers 50 --hidden-size 4096 --num-attention-heads 32"
    args = example.parse([*flags.split(), "--batch-size", "10", "--checkpoint-activations"])
    assert example.needs(args) == example.needs(example.parse([]))
    assert example.config_of(args)["train_micro_batch_size_per_gpu"] == 10
    with pytest.raises(SystemExit):
        example.parse(["--model-parallel-size", "2"])
    assert "share the states" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--checkpoint-activations", "--no-checkpoint-activations"])
def test_checkpointing_changes_no_bit(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    calls: list[object] = []
    checkpoint = example.deepspeed.checkpointing.checkpoint
    monkeypatch.setattr(
        example.deepspeed.checkpointing,
        "checkpoint",
        lambda *given: calls.append(given) or checkpoint(*given),
    )
    small = ["--num-layers=2", "--hidden-size=32", "--num-attention-heads=2", "--sequence=16"]
    words = [*small, "--vocabulary=20", "--steps=2", "--batch-size=2"]
    expected = example.train(example.parse(words))
    calls.clear()
    assert example.train(example.parse([*words, flag])) == expected
    assert bool(calls) == (flag == "--checkpoint-activations")
