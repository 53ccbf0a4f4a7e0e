"""``deepspeed.ops.lion``: Lion, which torch does not have.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
"""

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tensorstow.base.errors import OptionError
from tensorstow.doorkit.keyword_table import FP32_STATES, checks_keywords


@checks_keywords(FP32_STATES)
class Lion(Optimizer):
    """Lion: the sign of an average of gradients, with decoupled weight decay.

    ``initialize`` creates it again over the placed model, with the same groups.

    Args:
        params: Parameters, named parameters, or parameter groups.
        lr: The learning rate. Default: 1e-3.
        betas: The weight of the average in the sign, and its decay rate. Default: (0.9, 0.999).
        weight_decay: The weight decay. Default: 0.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,  # noqa: ARG002  # the table refuses others
    ) -> None:
        if lr < 0.0 or weight_decay < 0.0 or not all(0.0 <= beta < 1.0 for beta in betas):
            message = (
                f"lr={lr}, betas={betas}, weight_decay={weight_decay} were given: rates are not"
                " negative, betas are at least 0 and below 1."
            )
            raise OptionError(message)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Returns:
            What ``closure`` returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                parameter.mul_(1.0 - rate * group["weight_decay"])
                direction = average.mul(first).add_(parameter.grad, alpha=1.0 - first).sign_()
                parameter.add_(direction, alpha=-rate)
                average.mul_(second).add_(parameter.grad, alpha=1.0 - second)
        return loss


DeepSpeedCPULion = FusedLion = Lion
"""Upstream's names: where it computes is chosen by ``initialize``."""
