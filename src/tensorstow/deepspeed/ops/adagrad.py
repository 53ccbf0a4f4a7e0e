"""``deepspeed.ops.adagrad``: torch's Adagrad by upstream's signature."""

import torch
from torch.optim.optimizer import ParamsT

from tensorstow.base.errors import OptionError

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """DeepSpeed's CPUAdagrad; ``initialize`` creates torch's Adagrad with the same groups.

    Args:
        model_params: Parameters, named parameters, or parameter groups.
        lr: The learning rate. Default: 1e-2.
        eps: Is added to the root of the sum of squares. Default: 1e-10.
        weight_decay: The weight decay. Default: 0.
        amsgrad: Must be False: Adagrad has none.
        fp32_optimizer_states: Must be True.

    Raises:
        OptionError: One of the last two is another.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002  # upstream's
        fp32_optimizer_states: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        """Create the optimizer; the class documents the arguments."""
        if amsgrad or not fp32_optimizer_states:
            message = (
                f"amsgrad={amsgrad}, fp32_optimizer_states={fp32_optimizer_states} were given:"
                " Adagrad has no maximum, and its states are fp32. Leave both out."
            )
            raise OptionError(message)
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps, foreach=False)
