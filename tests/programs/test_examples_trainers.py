"""The examples of trainers, with ``--tiny``: they train, save, and go on where they stopped."""

import gc
import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tensorstow import named_weights, parameter_bytes
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


def test_a_server_has_the_bits_of_each_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO: what the server computes with, beside the model's state dict of that moment."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # for rollout_func
    example = importlib.import_module("rl_hand_over")
    wanted: list[dict[str, torch.Tensor]] = []
    received: list[tuple[int, dict[str, torch.Tensor]]] = []
    update = example.Server.update

    def names_and_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from named_weights(model)
        wanted.append({name: value.clone() for name, value in model.state_dict().items()})

    def update_and_note(server: Any, step: int, weights: Any) -> None:  # noqa: ANN401
        update(server, step, weights)
        state = server.model.state_dict().items()
        received.append((step, {name: value.clone() for name, value in state}))

    monkeypatch.setattr(example, "named_weights", names_and_weights)
    monkeypatch.setattr(example.Server, "update", update_and_note)
    run("rl_hand_over")
    assert [step for step, _ in received] == [1, 2, 3]
    assert all(same(theirs, ours) for (_, theirs), ours in zip(received, wanted, strict=True))
    assert not same(wanted[0], wanted[2])


def test_the_stand_in_refuses_what_is_not_its_models(tmp_path: Path) -> None:
    example, tiny = importlib.import_module("rl_hand_over"), importlib.import_module("tiny")
    server = example.Server(tiny.make_tiny(tmp_path / "tiny")[0])
    weights = dict(named_weights(server.model))
    server.update(1, weights.items())
    first = next(iter(weights))
    for wrong in (weights[first][1:], weights[first].float()):
        with pytest.raises(ValueError, match=f"The server has no {first} of"):
            server.update(2, {**weights, first: wrong}.items())
    with pytest.raises(ValueError, match=r"no model\.strange of"):
        server.update(2, [("model.strange", weights[first])])
    del weights[first]
    with pytest.raises(ValueError, match=f"did not get {first}"):
        server.update(2, weights.items())
    assert server.step == 1
