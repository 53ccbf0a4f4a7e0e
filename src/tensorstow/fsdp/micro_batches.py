"""ZeRO-1: gradients stay whole between micro-batches and are reduced with the last one.

[Note: Micro-batches] A micro-batch is a forward with gradients. Before the last one FSDP2 is told
to keep weights gathered and gradients unreduced; with it they are reduced and weights let go of, so
that the next forward gathers new ones (a gather of what is gathered does nothing).
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tensorstow.base.errors import OptionError


class MicroBatches:
    """Counts the micro-batches of a step and tells FSDP2 which is the last."""

    def __init__(self, model: FSDPModule, steps: int) -> None:
        """Watch ``model``, whose step has ``steps`` micro-batches."""
        self._model = model
        self._steps = steps
        self._seen = 0

    def watch(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the hooks in place."""
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        optimizer.register_step_pre_hook(self._before_step)

    def _before_forward(self, *_: Any) -> None:  # noqa: ANN401  # torch's own signature
        if not torch.is_grad_enabled():
            return
        self._seen += 1
        if self._seen > self._steps:
            self._seen = 1
        last = self._seen == self._steps
        self._model.set_requires_gradient_sync(last)
        self._model.set_reshard_after_backward(last)

    def _before_step(self, *_: Any) -> None:  # noqa: ANN401
        if self._seen % self._steps:
            message = (
                f"step() was called after {self._seen} of accumulation_steps={self._steps}"
                " micro-batches: under stage 1 gradients are reduced with the last one, and these"
                " were not. Take all, or use stage 2 or 3."
            )
            raise OptionError(message)
        self._seen = 0
