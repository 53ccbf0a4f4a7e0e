"""A step of an engine: what ``loss.backward()`` lacks, and the update with its norm and scale."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from tensorstow.base.errors import BackwardError, OptionError
from tensorstow.deepspeed.loss_scale import LossScale
from tensorstow.fsdp.module_hooks import tensors_of
from tensorstow.optim.placed import PlacedOptimizer

logger = logging.getLogger("tensorstow")


class DirectBackward:
    """Divides gradients of a backward that the engine does not run, where that is enough.

    Args:
        micro_batches: The micro-batches of a step.
        needs_scale: Whether losses are multiplied by a loss scale.
        beside_backward: Whether updates run during backward, with gradients that are final.
        times: What gradients are multiplied by: the number of ranks, for a sum over them.
    """

    def __init__(
        self,
        micro_batches: int,
        *,
        needs_scale: bool,
        beside_backward: bool = False,
        times: int = 1,
    ) -> None:
        self.micro_batches = micro_batches
        """Those of a step; the engine may change them."""
        self._needs_scale = needs_scale
        self._beside_backward = beside_backward
        self._times = times
        self._is_engines = False
        self.is_scaled = False
        """Whether ``engine.scale`` has scaled the loss that is to be gone through backward."""

    @contextmanager
    def engines_own(self) -> Iterator[None]:
        """Return a context for a backward of the engine's, whose loss is divided and scaled."""
        self._is_engines = True
        try:
            yield
        finally:
            self._is_engines = False

    def watch(self, output: object) -> None:
        """Watch the tensors that a forward with gradients returned."""
        self.is_scaled = False
        if self._keeps_gradients and not self._needs_scale:
            return
        tensors = tensors_of(output)
        if any(map(is_functorch_wrapped_tensor, tensors)):  # torch.func's gradients are the user's
            return
        for tensor in tensors:
            watch: Any = tensor.register_hook
            watch(self._divide if len(tensors) == 1 else self._refuse)

    @property
    def _keeps_gradients(self) -> bool:
        """Whether a step is one micro-batch, averaged over ranks."""
        return self.micro_batches == 1 and self._times == 1

    def _divide(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._is_engines:
            return None
        if self._needs_scale and not self.is_scaled:
            message = (
                "Loss scaling is required for this configuration, but backward() was called"
                " directly without scaling the loss. Use engine.backward(loss), or"
                " engine.scale(loss).backward()."
            )
            raise BackwardError(message)
        if self._keeps_gradients:
            return gradient
        if self._beside_backward and self.micro_batches > 1:
            message = (
                "backward() was called directly, with gradient_accumulation_steps="
                f'{self.micro_batches} and overlap="backward" or "speculative": which micro-batch'
                " is the last of a step is known to engine.backward(loss) alone. Use that."
            )
            raise BackwardError(message)
        return gradient * self._times / self.micro_batches

    def _refuse(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._is_engines or self._keeps_gradients:
            return self._divide(gradient)
        # A loss that is computed of another output passes both, and would be divided twice.
        message = (
            "backward() was called directly, with gradient_accumulation_steps="
            f"{self.micro_batches}, gradients that are multiplied by {self._times}, and a"
            " model that returns several tensors: which of them the gradients are to be multiplied"
            " at is not known. Use engine.backward(loss)."
        )
        raise BackwardError(message)


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
