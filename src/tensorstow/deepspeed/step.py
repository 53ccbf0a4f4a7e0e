"""One update of an engine: norm, clipping, loss scale, and steps that are skipped."""

import logging
import math
from functools import partial
from typing import Any

import torch

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.loss_scale import LossScale
from tensorstow.optim.placed import PlacedOptimizer

logger = logging.getLogger("tensorstow")


class OptimizerStep:
    """One step of the optimizer: norm, clipping, loss scale, and whether it is skipped.

    The loss scale and the clip factor are applied inside the update; the only pass over the
    gradients is the one for their norm. The norm is summed over all ranks, so a gradient that is
    not finite makes it so on every rank: then no rank takes the step, in any precision. Where
    updates run during backward, which neither clips nor scales, such a step cannot be skipped any
    more and is an error.
    """

    def __init__(
        self, optimizer: PlacedOptimizer, clipping: float, scale: LossScale | None
    ) -> None:
        """Clip to the 2-norm ``clipping``, 0: not at all; ``scale`` is None without fp16."""
        self._optimizer = optimizer
        self._clipping = clipping
        self._scale = scale
        self._beside_backward = optimizer.offload_policy.timing.begins_early
        if self._beside_backward:
            optimizer._keep_norms()  # noqa: SLF001  # a hook of the engine
        self.unscaled = 0
        """Backwards since the last step whose losses were not multiplied by the loss scale."""
        self.norm: torch.Tensor | None = None
        """Norm of the last gradients of all ranks together, before clipping."""
        self._tell(overflow=False)

    @property
    def factor(self) -> float:
        """The factor by which a loss is multiplied."""
        return 1.0 if self._scale is None else self._scale.scale

    def drop_gradients(self) -> None:
        """Begin the step again: drop the gradients of its backwards."""
        self._optimizer.zero_grad()
        self.unscaled = 0

    def run(self) -> bool:
        """Take or skip a step, drop the gradients, and return whether it was taken."""
        taken = self._end() if self._beside_backward else self._begin_and_end()
        self._tell(overflow=not taken)
        return taken

    def _tell(self, *, overflow: bool) -> None:
        """Set the attributes of upstream's optimizer that scripts read."""
        optimizer: Any = self._optimizer
        optimizer.overflow = overflow
        optimizer.loss_scale = optimizer.cur_scale = self.factor
        optimizer.loss_scaler = self._scale
        optimizer.dynamic_loss_scale = self._scale is not None and self._scale.dynamic
        optimizer.needs_scaler = partial(bool, self._scale is not None)

    def _begin_and_end(self) -> bool:
        factor = 1.0 if self.unscaled else self.factor
        self.unscaled = 0
        limit = self._clipping if self._clipping > 0.0 else math.inf
        self.norm = norm = self._optimizer.clip_grad_norm_(limit, loss_scale=factor)
        overflow = not bool(torch.isfinite(norm))
        self._optimizer._step_scaled(factor, overflowed=overflow)  # noqa: SLF001  # a hook of the engine
        self._optimizer.zero_grad()
        if self._scale is not None:
            self._scale.update(overflowed=overflow)
        if overflow:
            logger.warning("A step was skipped: the norm of its gradients is %s", norm.item())
        return not overflow

    def _end(self) -> bool:
        """End the step whose updates have begun during backward."""
        self.norm = norm = self._optimizer.grad_norm()
        if not bool(torch.isfinite(norm)):
            message = (
                f"The norm of the gradients is {norm.item()}, and updates by them have run during"
                " backward: the step cannot be skipped. Load the last checkpoint into an engine of"
                ' initialize(..., overlap="none"), or of bf16.check_grad_overflow, which skips such'
                " steps."
            )
            raise OptionError(message)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return True
