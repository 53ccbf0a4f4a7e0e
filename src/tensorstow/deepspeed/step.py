"""One update of an engine: norm, clipping, loss scale, and steps that are skipped."""

import logging
import math

import torch

from tensorstow.deepspeed.loss_scale import LossScale
from tensorstow.optim.stowed_adam import StowedAdam

logger = logging.getLogger("tensorstow")


class OptimizerStep:
    """One step of the optimizer: norm, clipping, loss scale, and whether it is skipped.

    The loss scale and the clip factor are applied inside the update; the only pass over the
    gradients is the one for their norm. The norm is summed over all ranks, so a gradient that is
    not finite makes it so on every rank: then no rank takes the step, in any precision.
    """

    def __init__(self, optimizer: StowedAdam, clipping: float, scale: LossScale | None) -> None:
        """Clip to the 2-norm ``clipping``, 0: not at all; ``scale`` is None without fp16."""
        self._optimizer = optimizer
        self._clipping = clipping
        self._scale = scale
        self.norm: torch.Tensor | None = None
        """Of the last gradients, all ranks' together, before clipping."""

    @property
    def factor(self) -> float:
        """The number that a loss is multiplied by."""
        return 1.0 if self._scale is None else self._scale.scale

    def run(self) -> bool:
        """Take or skip a step, drop the gradients, and return whether it was taken."""
        factor = self.factor
        limit = self._clipping * factor if self._clipping > 0.0 else math.inf
        norm = self._optimizer.clip_grad_norm_(limit)
        self.norm = norm / factor
        overflow = not bool(torch.isfinite(norm))
        self._optimizer.step_scaled(factor, overflowed=overflow)
        self._optimizer.zero_grad()
        if self._scale is not None:
            self._scale.update(overflowed=overflow)
        if overflow:
            logger.warning("A step was skipped: the norm of its gradients is %s", norm.item())
        return not overflow
