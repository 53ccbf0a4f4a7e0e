"""``deepspeed.ops.adam``: upstream's signatures over tensorstow's Adam."""

from typing import Any

from torch.optim.optimizer import ParamsT

from tensorstow.base.fields import read_value
from tensorstow.doorkit.keyword_table import ADAM, FP32_STATES, Table, checks_keywords, honoured
from tensorstow.optim.adam import Adam
from tensorstow.optim.stowed_adam import StowedAdam


@checks_keywords({**ADAM, **FP32_STATES})
class DeepSpeedCPUAdam(Adam):
    """DeepSpeed's CPUAdam: Adam or AdamW, by default with its states in host memory.

    ``initialize`` creates it again over the sharded model, with the same groups. Unlike upstream,
    ``amsgrad`` works.

    Args:
        placement: The keywords of ``tensorstow.AdamW`` that place the states.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,  # noqa: ARG002  # the table refuses others
        **placement: Any,
    ) -> None:
        decay: dict[str, Any] = {"decoupled_weight_decay": adamw_mode}
        super().__init__(model_params, lr, betas, eps, weight_decay, amsgrad, **decay, **placement)
        set_bias_correction(self, bias_correction=bias_correction)


_FUSED: Table = {
    **{name: ADAM[name] for name in ADAM if name not in {"model_params", "adamw_mode"}},
    "params": ADAM["model_params"],
    "adam_w_mode": ADAM["adamw_mode"],
    "set_grad_none": honoured("What ``zero_grad()`` does by default: True sets ``.grad`` to None."),
}


@checks_keywords(_FUSED)
class FusedAdam(Adam):
    """DeepSpeed's FusedAdam: Adam or AdamW, updated on the CPU by default; see ``placement``.

    Args:
        placement: The keywords of ``tensorstow.AdamW`` that place the states.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **placement: Any,
    ) -> None:
        decay: dict[str, Any] = {"decoupled_weight_decay": adam_w_mode}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **decay, **placement)
        self._set_grad_none = set_grad_none
        set_bias_correction(self, bias_correction=bias_correction)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them.

        Args:
            set_to_none: Whether ``.grad`` becomes None. Default: None, the value of
            ``set_grad_none``.
        """
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)


def set_bias_correction(optimizer: StowedAdam, *, bias_correction: bool) -> None:
    """Set whether the moments of every group are corrected for their start at zero.

    Args:
        optimizer: The optimizer.
        bias_correction: False turns the correction off.
    """
    if not read_value(bool, bias_correction, "bias_correction"):
        optimizer.defaults["bias_correction"] = False
        for group in optimizer.param_groups:
            group["bias_correction"] = False
