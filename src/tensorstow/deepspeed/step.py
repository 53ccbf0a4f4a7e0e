"""One update of an engine: the norm, clipping, the loss scale, and when it is skipped."""

import logging
import math
from typing import Any

import torch

from tensorstow.deepspeed.loss_scale import LossScale
from tensorstow.optim.stowed_adam import StowedAdam

logger = logging.getLogger("tensorstow")


class OptimizerStep:
    """Takes steps by gradients of a scaled loss, all ranks alike.

    The scale and the clip factor go to the optimizer, which applies them inside its update; no pass
    over the gradients is made but the one for their norm. A gradient that is not finite makes the
    norm so on every rank, for it is summed over all: then no rank takes the step, in any precision.
    """

    def __init__(self, optimizer: StowedAdam, clipping: float, scale: LossScale | None) -> None:
        """Clip by the 2-norm ``clipping``; 0: not. ``scale``: None without fp16."""
        self._optimizer = optimizer
        self._clipping = clipping
        self._scale = scale
        self.norm: torch.Tensor | None = None
        """Of the last gradients, all ranks' together, before clipping."""

    @property
    def factor(self) -> float:
        """Return what a loss is to be multiplied by."""
        return 1.0 if self._scale is None else self._scale.scale

    def run(self) -> bool:
        """Take a step, or skip it; return whether it was taken. Gradients are dropped."""
        factor = self.factor
        limit = self._clipping * factor if self._clipping > 0.0 else math.inf
        norm = self._optimizer.clip_grad_norm_(limit)
        self.norm = norm / factor
        overflow = not bool(torch.isfinite(norm))
        self._step(factor, overflow=overflow)
        self._optimizer.zero_grad()
        if self._scale is not None:
            self._scale.update(overflowed=overflow)
        if overflow:
            logger.warning("A step was skipped: the norm of its gradients is %s", norm.item())
        return not overflow

    def _step(self, factor: float, *, overflow: bool) -> None:
        """Step as ``torch.amp.GradScaler`` does, which tells an optimizer by attributes.

        But not by its own for the scale, which asks for gradients without it: these are dropped.
        Ranks need not ask each other for overflows: they have the same norm.
        """
        told: dict[str, Any] = {} if factor == 1.0 else {"_loss_scale": factor}
        if overflow:
            told["found_inf"] = torch.tensor(1.0)
        for name, value in told.items():
            setattr(self._optimizer, name, value)
        try:
            self._optimizer.step()
        finally:
            for name in told:
                delattr(self._optimizer, name)
