"""Lightning with our optimizer, which needs no module of ours: its wrappers, checkpoints, moves."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.callbacks import ModelCheckpoint

import trainers
from tensorstow import AdamW, PipelinePolicy

SMALL = PipelinePolicy(chunk_elements=1024, depth=2)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
pytestmark = [
    # Of a machine with few cores, and of libraries that it uses.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Module(lightning.LightningModule):
    def __init__(self, **where: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.net, self.where = trainers.model().train(), where

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.net(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        self.training_step(batch, number)

    def configure_optimizers(self) -> AdamW:
        groups = trainers.plain_groups(self.net)
        return AdamW(groups, lr=1e-2, module=self.net, policy=SMALL, **self.where)

    def on_before_optimizer_step(self, optimizer: Any) -> None:  # noqa: ANN401
        if "overlap" not in self.where:
            optimizer.clip_grad_norm_(0.1)


class ByHand(Module):
    """Manual optimization, through Lightning's wrapper of the optimizer."""

    automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, number))
        optimizer.step()
        optimizer.zero_grad()


def loader(batches: int) -> Any:  # noqa: ANN401
    return torch.utils.data.DataLoader(trainers.examples(batches), batch_size=trainers.BATCH)


def fit(module: Module, batches: int, path: Path | None = None, **given: Any) -> list[bytes]:  # noqa: ANN401
    trainer = lightning.Trainer(
        **{"enable_checkpointing": False, "max_epochs": 1, **QUIET, **given}
    )
    trainer.fit(module, loader(batches), loader(1), ckpt_path=path, weights_only=True)
    found = trainers.bits(module.net)
    trainer.optimizers[0].close()
    return found


def by_hand(
    batches: int, accumulation: int = 1, clip: float | None = 0.1, epochs: int = 1
) -> list[bytes]:
    net = trainers.model().train()
    optimizer = AdamW(trainers.plain_groups(net), lr=1e-2)
    for window in trainers.windows(batches, accumulation) * epochs:
        for batch in window:
            (net(input_ids=batch, labels=batch).loss / accumulation).backward()
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    return trainers.bits(net)


def test_weights_are_those_of_the_plain_loop() -> None:
    """Five micro-batches by two, with validation between steps."""
    given = {"accumulate_grad_batches": 2, "val_check_interval": 2}
    assert fit(Module(states="disk"), 5, **given) == by_hand(5, 2)


def test_manual_optimization_and_updates_beside_backward() -> None:
    """Lightning's wrapper delegates; nothing clips by default, so backward may update."""
    assert fit(ByHand(states="disk"), 3, limit_val_batches=0) == by_hand(3)
    beside = Module(states="disk", overlap="backward")
    assert fit(beside, 3) == by_hand(3, clip=None)


def test_a_checkpoint_is_small_and_goes_on(tmp_path: Path) -> None:
    where = {"states": "disk", "dir": tmp_path / "run", "checkpoints": "ticket"}

    def trained(path: Path | None = None) -> list[bytes]:
        saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        given = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 2}
        return fit(Module(**where), 2, path, **given)

    complete = trained()
    (path,) = tmp_path.glob("epoch=0.ckpt")
    saved = torch.load(path, weights_only=True)
    assert saved["optimizer_states"][0]["state"] == {}
    weights = sum(t.numel() * t.element_size() for t in saved["state_dict"].values())
    assert path.stat().st_size - weights < 1 << 20
    assert trained(path) == complete == by_hand(2, epochs=2)


def test_states_on_disk_stay_there_when_all_are_moved() -> None:
    """As before and behind each fit, and when a checkpoint was loaded."""
    net = trainers.model()
    optimizer = AdamW(net.parameters(), states="disk", policy=SMALL)
    batch = trainers.micro_batches(1)[0]
    for _ in range(2):
        net(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _optimizer_to_device(optimizer, torch.device("meta"))  # stands in for a GPU
    other = trainers.model()
    plain = AdamW(other.parameters())
    for _ in range(2):
        other(input_ids=batch, labels=batch).loss.backward()
        plain.step()
        plain.zero_grad()
    assert trainers.bits(net) == trainers.bits(other)
    optimizer.close()
