"""``deepspeed.ops.adagrad``: torch's Adagrad by upstream's signature."""

import torch
from torch.optim.optimizer import ParamsT

from tensorstow.doorkit.keyword_table import ADAM, FP32_STATES, checks_keywords, honoured, refused

_TABLE = {
    **{name: ADAM[name] for name in ("model_params", "lr", "weight_decay")},
    "eps": honoured("Is added to the root of the sum of squares."),
    **refused("Adagrad has no maximum", "amsgrad"),
    **FP32_STATES,
}


@checks_keywords(_TABLE)
class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """DeepSpeed's CPUAdagrad; ``initialize`` creates torch's Adagrad with the same groups."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: ARG002
        fp32_optimizer_states: bool = True,  # noqa: ARG002  # the table refuses others
    ) -> None:
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps, foreach=False)
