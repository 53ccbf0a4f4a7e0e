"""``colossalai.nn.lr_scheduler``: the two schedules with warmup of its tutorials."""

import math

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tensorstow.base.absent_names import refuse_names
from tensorstow.base.errors import OptionError

_OF_TORCH = "use torch.optim.lr_scheduler.{}, which boost() takes too"
_WARMUP = "SequentialLR([LinearLR(...), {}(...)], milestones=[warmup_steps])"
_ABSENT = {
    **{
        name: _OF_TORCH.format(name)
        for name in (
            *("CosineAnnealingLR", "ExponentialLR", "LambdaLR", "MultiplicativeLR", "MultiStepLR"),
            *("OneCycleLR", "PolynomialLR", "StepLR"),
        )
    },
    "FlatAnnealingLR": _OF_TORCH.format(
        "SequentialLR([ConstantLR(factor=1), CosineAnnealingLR(...)], milestones=[flat_steps])"
    ),
    "FlatAnnealingWarmupLR": _OF_TORCH.format(
        "SequentialLR of LinearLR, ConstantLR(factor=1) and CosineAnnealingLR"
    ),
    "MultiStepWarmupLR": _OF_TORCH.format(_WARMUP.format("MultiStepLR")),
    "PolynomialWarmupLR": _OF_TORCH.format(_WARMUP.format("PolynomialLR")),
}
__getattr__ = refuse_names(__name__, _ABSENT)


class _WarmupLR(LRScheduler):
    """Counts the steps of the warmup, and of what follows it."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        if not 0 <= warmup_steps < total_steps:
            message = (
                f"warmup_steps={warmup_steps} was given with total_steps={total_steps}: it is at"
                " least 0, and below total_steps."
            )
            raise OptionError(message)
        self.total_steps, self.warmup_steps = total_steps, warmup_steps
        super().__init__(optimizer, last_epoch)


class CosineAnnealingWarmupLR(_WarmupLR):
    """Raises the learning rate to its value in a line, then lowers it by half a cosine.

    Args:
        optimizer: The optimizer.
        total_steps: The steps of the warmup and the cosine.
        warmup_steps: Those of the warmup.
        eta_min: The learning rate at the end.
        last_epoch: The step before the first one; -1 begins.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each group at this step."""
        step = self.last_epoch - self.warmup_steps
        if step < 0:
            return [(self.last_epoch + 1) / self.warmup_steps * lr for lr in self.base_lrs]
        share = (1 + math.cos(math.pi * step / (self.total_steps - self.warmup_steps))) / 2
        return [self.eta_min + (lr - self.eta_min) * share for lr in self.base_lrs]


class LinearWarmupLR(_WarmupLR):
    """Raises the learning rate to its value in a line, then lowers it to 0 in another one.

    Args:
        optimizer: The optimizer.
        total_steps: The steps of both.
        warmup_steps: Those of the warmup.
        last_epoch: The step before the first one; -1 begins.
    """

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each group at this step."""
        if self.last_epoch < self.warmup_steps:
            share = (self.last_epoch + 1) / (self.warmup_steps + 1)
        else:
            share = (self.total_steps - self.last_epoch) / (self.total_steps - self.warmup_steps)
        return [share * lr for lr in self.base_lrs]
