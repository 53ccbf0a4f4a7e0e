"""A run through a door, or in Lightning, that torchrun starts again: a rank is killed or signalled.

``python -m ranks.elastic DOOR FOLDER END``: it goes on from its newest checkpoint. END "kill" or
"signal" happens to rank 1 in the middle of the run, once; by "wait" it waits there while there is a
file, for a signal to torchrun; by "" nothing happens.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ranks.stopped_doors import (
    STATUS,
    STEPS,
    STOPPED,
    ColossalRun,
    DeepSpeedRun,
    Signalled,
    batch_of,
    weights_of,
)
from tensorstow.fsdp.full_tensors import whole_weights

STOP_SIGNALS = {"SIGTERM": STATUS}
_SIGNALS = {"kill": signal.SIGKILL, "signal": signal.SIGTERM}


def come(folder: Path, end: str, step: int) -> None:
    """Let ``end`` happen in a step of rank 1, once."""
    if end == "wait" and step == STOPPED and os.environ["RANK"] == "1":
        (folder / "waits").touch()
        while (folder / "waits").exists():
            time.sleep(0.05)
        time.sleep(1)  # torchrun hands the signal on
    elif end and step == STOPPED and os.environ["RANK"] == "1":
        with suppress(FileExistsError):
            (folder / "has-come").touch(exist_ok=False)
            os.kill(os.getpid(), _SIGNALS[end])


def through_a_door(door: Callable[..., Any], folder: Path, end: str) -> list[torch.Tensor]:
    """Train with a checkpoint after each step before a kill; by a signal there is one."""
    run = door(folder, stop_signals=STOP_SIGNALS)
    for step in range(run.begun, STEPS):
        come(folder, end, step)
        run.train(step)
        if end == "kill":
            run.save(step + 1)
    weights = weights_of(run)
    run.close()
    return weights


def in_lightning(folder: Path, end: str) -> list[torch.Tensor]:
    """Train in Lightning with ``stow``."""
    import lightning  # noqa: PLC0415  # seconds
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415

    import tensorstow  # noqa: PLC0415
    from tensorstow.integrations.lightning import StopCheckpoint, StowStrategy  # noqa: PLC0415

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Signalled(None, 0)

        def training_step(self, batch: object, _: int) -> torch.Tensor:
            del batch  # the loader begins again: what a step uses depends on its number
            come(folder, end, self.global_step)
            loss: torch.Tensor = self.net(batch_of(self.global_step), 0)
            return loss

        def configure_optimizers(self) -> object:
            adamw = partial(tensorstow.AdamW, lr=1e-2, checkpoints="reference")
            plan = tensorstow.Plan(parameters="disk", states="disk")
            return tensorstow.stow(self.net, adamw, plan=plan, dir=folder / "run")[1]

    every = {"every_n_train_steps": 1} if end == "kill" else {}
    saves = ModelCheckpoint(folder / "saved", save_last=True, **every)
    trainer = lightning.Trainer(
        strategy=StowStrategy(),
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        callbacks=[saves, StopCheckpoint(folder / "stops", stop_signals=STOP_SIGNALS)],
    )
    module = Module()
    loader = torch.utils.data.DataLoader(torch.zeros(64, 1))
    trainer.fit(module, loader, ckpt_path="last", weights_only=True)
    weights = [values.clone() for _, values in whole_weights(module.net)]
    trainer.optimizers[0].close()
    return weights


DOORS: dict[str, Callable[[Path, str], list[torch.Tensor]]] = {
    "deepspeed": partial(through_a_door, partial(DeepSpeedRun, kind="bf16", moment=None)),
    "colossalai": partial(through_a_door, partial(ColossalRun, kind="gemini", moment=None)),
    "lightning": in_lightning,
}


def main(door: str, folder: Path, end: str) -> None:
    """Train, and write the weights of each rank."""
    torch.set_num_threads(1)
    weights = DOORS[door](folder, end)
    torch.save(weights, folder / f"weights-{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
