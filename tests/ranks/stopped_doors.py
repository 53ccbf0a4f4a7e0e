"""Runs through the doors that a signal stops, and their next ones: what tests call in each rank."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import tensorstow.deepspeed as deepspeed
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from tensorstow.colossalai.nn.optimizer import HybridAdam
from tensorstow.fsdp.full_tensors import whole_weights
from tensorstow.fsdp.sharding import rank_here, world_size

STEPS, STOPPED = 6, 3
STATUS = 75
MOMENTS = ("forward", "backward", "step", "after")
"""What a signal interrupts; "after": what follows a step in the loop."""
PLUGINS: dict[str, Callable[[], Any]] = {
    "gemini": partial(GeminiPlugin, placement_policy="cpu", max_norm=0.5),
    "zero": partial(LowLevelZeroPlugin, stage=1, cpu_offload=True),
    "ddp": TorchDDPPlugin,
}


class Signalled(nn.Module):
    """A model in which a signal comes, once, to one rank."""

    def __init__(self, moment: str | None, rank: int) -> None:
        """Make the weights; ``moment`` None: no signal comes."""
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.moment = moment if rank_here() == rank else None

    def come(self, moment: str) -> None:
        """Send the signal to this process if it is to come now."""
        if moment == self.moment:
            self.moment = None
            os.kill(os.getpid(), signal.SIGUSR1)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Return a loss."""
        y = self.layers[:2](x)
        if step == STOPPED:
            self.come("forward")
            y.register_hook(lambda _: self.come("backward"))
        return (self.layers[2](y) - x).square().mean()


def rate(step: int) -> float:
    """Return a factor of the learning rate that differs in each step."""
    return 1.0 / (1 + step)


def batch_of(step: int, micro: int = 0) -> torch.Tensor:
    """Return this rank's samples."""
    torch.manual_seed(1000 * step + 10 * micro + rank_here())
    return torch.randn(2, 6)


class DeepSpeedRun:
    """An engine with two micro-batches a step, and a scheduler."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        moment: str | None,
        rank: int = 0,
        stop_signals: Any = None,  # noqa: ANN401
    ) -> None:
        """Make it, and load the newest checkpoint of ``folder``."""
        self.model = Signalled(moment, rank)
        where = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
        config = {
            "train_batch_size": 4 * world_size(),
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "gradient_clipping": 0.5,
            kind: {"enabled": True},
            "zero_optimization": where,
        }
        self.rates: list[int] = []
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=self.model,
            config=config,
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, self._rate),
            stop_signals=stop_signals,
            on_stop=None if stop_signals is None else self._save,
        )
        self._folder = folder / "checkpoints"
        _, state = self.engine.load_checkpoint(self._folder)
        self.begun = 0 if state is None else int(state["step"])
        self._step = self.begun

    def _rate(self, step: int) -> float:
        if step == STOPPED + 1 and self.engine.global_steps == STOPPED:
            self.model.come("step")
        return rate(step)

    def save(self, step: int) -> None:
        """Save a checkpoint after as many steps."""
        self._step = step
        self._save()

    def _save(self) -> None:
        self.engine.save_checkpoint(self._folder, client_state={"step": self._step})

    def train(self, step: int) -> None:
        """Take a step."""
        self._step = step
        for micro in range(2):
            self.engine.backward(self.engine(batch_of(step, micro).to(self.dtype), step))
            self.engine.step()
        if step == STOPPED:
            self.model.come("after")

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return torch.bfloat16 if self.engine.bfloat16_enabled() else torch.float32

    def close(self) -> None:
        """Free everything."""
        self.engine.destroy()


class ColossalRun:
    """A booster's model, optimizer and scheduler."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        moment: str | None,
        rank: int = 0,
        stop_signals: Any = None,  # noqa: ANN401
    ) -> None:
        """Make it, and load the checkpoint of ``folder`` if there is one."""
        net = Signalled(moment, rank)
        self.booster = Booster(
            plugin=PLUGINS[kind](),
            stop_signals=stop_signals,
            on_stop=None if stop_signals is None else self._save,
        )
        given = HybridAdam(net.parameters(), lr=1e-2)
        self.net, self._folder = net, folder
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(
            net, given, lr_scheduler=LambdaLR(given, rate)
        )
        net.to("cpu")
        self.optimizer.optim.register_step_pre_hook(lambda *_: self._come("step"))
        self.begun, counted = 0, folder / "step"
        if counted.exists():
            self.booster.load_model(self.model, folder / "model.pt")
            self.booster.load_optimizer(self.optimizer, folder / "optimizer.pt")
            self.booster.load_lr_scheduler(self.scheduler, folder / "scheduler.pt")
            self.begun = int(counted.read_text())
        self._step = self.begun

    def _come(self, moment: str) -> None:
        if self._step == STOPPED:
            self.net.come(moment)

    def save(self, step: int) -> None:
        """Save a checkpoint after as many steps."""
        self._step = step
        self._save()

    def _save(self) -> None:
        self.booster.save_model(self.model, self._folder / "model.pt")
        self.booster.save_optimizer(self.optimizer, self._folder / "optimizer.pt")
        self.booster.save_lr_scheduler(self.scheduler, self._folder / "scheduler.pt")
        (self._folder / "step").write_text(str(self._step))

    def train(self, step: int) -> None:
        """Take a step."""
        self._step = step
        self.booster.backward(self.model(batch_of(step), step), self.optimizer)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self._come("after")

    def close(self) -> None:
        """Free everything."""
        if self.model.stop_point is not None:
            self.model.stop_point.close()
        self.optimizer.close()


Stopped = tuple[list[object], list[int], bool]


def until_stopped(door: type, folder: Path, kind: str, moment: str, rank: int) -> Stopped:
    """Train until a signal to ``rank`` stops the run, and go on in another one.

    Return the status, the steps from which each run went on, and whether the weights are those of
    a run that is never stopped.
    """
    stop_signals = {"SIGUSR1": STATUS}
    before = signal.getsignal(signal.SIGUSR1)
    statuses: list[object] = []
    begun = []
    for run_moment in (moment, None):
        run = door(folder, kind, run_moment, rank, stop_signals)
        begun.append(run.begun)
        try:
            for step in range(run.begun, STEPS):
                run.train(step)
            statuses.append(None)
        except SystemExit as ended:
            statuses.append(ended.code)
        weights = weights_of(run)
        run.close()
        assert signal.getsignal(signal.SIGUSR1) == before
    whole = door(folder / "whole", kind, None)
    for step in range(STEPS):
        whole.train(step)
    wanted = weights_of(whole)
    whole.close()
    if dist.is_initialized():
        dist.barrier()
    is_same = bool(wanted) and all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))
    return statuses, begun, is_same


def weights_of(run: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """Return the whole weights of a run, on every rank."""
    module: Any = run.engine.module if isinstance(run, DeepSpeedRun) else run.model.unwrap()
    return [values.clone() for _, values in whole_weights(module)]
