"""The examples of trainers, with ``--tiny``: they train, save, and go on where they stopped."""

import gc
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tensorstow import parameter_bytes
from tensorstow.integrations.transformers import Stowed

pytestmark = [
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true"),  # transformers'
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing`:FutureWarning"),  # TRL's
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what TRL imports
    pytest.mark.usefixtures("kept_environment"),
]
Run = Callable[..., list[float]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs an example as its command does, and returns its losses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))

    def train(
        name: str,
        *words: str,
        stop_after: int | None = None,
        look: Callable[[Stowed], None] | None = None,
    ) -> list[float]:
        example = importlib.import_module(name)
        with monkeypatch.context() as patch:
            if stop_after is not None:
                patch.setattr(Stowed, "training_step", stopping(stop_after))
            trainer = example.main(example.parse(["--tiny", "--output=out", *words]))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if look is not None:
            look(trainer)
        trainer._optimizer().close()
        return losses

    return train


def stopping(after: int) -> Callable[..., torch.Tensor]:
    """Return a step of training that Ctrl-C ends once ``after`` steps are taken."""

    def step(self: Stowed, *args: Any, **keywords: Any) -> torch.Tensor:  # noqa: ANN401
        if self.state.global_step == after:
            raise KeyboardInterrupt
        return super(Stowed, self).training_step(*args, **keywords)

    return step


def weights_in(folder: str) -> dict[str, torch.Tensor]:
    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("name", ["finetune_8b_trainer", "lora", "sft_trl"])
def test_a_trainer_goes_on_to_the_weights_of_an_unbroken_run(name: str, run: Run) -> None:
    unbroken = run(name)
    assert unbroken[-1] < unbroken[0]
    wanted = weights_in("out/model")
    shutil.rmtree("out")
    with pytest.raises(KeyboardInterrupt):
        run(name, stop_after=3)
    gc.collect()
    assert not Path("out/model").exists()
    assert run(name) == unbroken  # the log is the checkpoint's, of two steps, and goes on
    assert same(weights_in("out/model"), wanted)


def test_a_checkpoint_that_a_kill_has_left_incomplete_is_not_gone_on_from(run: Run) -> None:
    run("finetune_8b_trainer", "--steps=2")
    incomplete = Path("out/checkpoint-3")
    shutil.copytree("out/checkpoint-2", incomplete)
    (incomplete / "trainer_state.json").unlink()
    assert len(run("finetune_8b_trainer", "--steps=4")) == 4


def test_the_base_of_lora_stays_in_its_files(run: Run) -> None:
    found = []

    def look(trainer: Stowed) -> None:
        frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
        found.extend((parameter_bytes(trainer.model).file_bytes, sum(p.nbytes for p in frozen)))

    run("lora", look=look)
    assert found[0] == found[1] > 0
    assert all("lora_" in name for name in weights_in("out/model"))
