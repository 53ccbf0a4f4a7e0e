"""``deepspeed.ops.adam``: upstream's signatures over tensorstow's Adam."""

from typing import Any

from torch.optim.optimizer import ParamsT

from tensorstow.base.errors import OptionError
from tensorstow.optim.adam import Adam
from tensorstow.optim.stowed_adam import StowedAdam


class DeepSpeedCPUAdam(Adam):
    """DeepSpeed's CPUAdam: Adam or AdamW, by default with its states in host memory.

    ``initialize`` creates it again over the sharded model, with the same groups. Unlike upstream,
    ``amsgrad`` works.

    Args:
        model_params: Parameters, named parameters, or parameter groups.
        lr: The learning rate. Default: 1e-3.
        bias_correction: Whether the moments are corrected for their start at zero.
        betas: The decay rates of the first and the second moment. Default: (0.9, 0.999).
        eps: Is added to the root of the second moment. Default: 1e-8.
        weight_decay: The weight decay. Default: 0.
        amsgrad: Whether the running maximum of the second moment is used.
        adamw_mode: Whether the decay is decoupled (AdamW) instead of an L2 penalty.
        fp32_optimizer_states: Must be True: ``state_format`` chooses smaller states.
        placement: The keywords of ``tensorstow.AdamW`` that place the states.

    Raises:
        OptionError: ``fp32_optimizer_states`` is False, or another argument cannot be used.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # upstream's
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,  # noqa: FBT001, FBT002
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        adamw_mode: bool = True,  # noqa: FBT001, FBT002
        fp32_optimizer_states: bool = True,  # noqa: FBT001, FBT002
        **placement: Any,  # noqa: ANN401
    ) -> None:
        """Create the optimizer; the class documents the arguments."""
        if not fp32_optimizer_states:
            message = (
                "fp32_optimizer_states=False was given: smaller states are chosen by their"
                ' format. Use state_format="bf16", or leave it out.'
            )
            raise OptionError(message)
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=adamw_mode,
            **placement,
        )
        set_bias_correction(self, bias_correction=bias_correction)


class FusedAdam(Adam):
    """DeepSpeed's FusedAdam: Adam or AdamW, updated on the CPU by default; see ``placement``.

    Args:
        params: Parameters, named parameters, or parameter groups.
        lr: The learning rate. Default: 1e-3.
        bias_correction: Whether the moments are corrected for their start at zero.
        betas: The decay rates of the first and the second moment. Default: (0.9, 0.999).
        eps: Is added to the root of the second moment. Default: 1e-8.
        adam_w_mode: Whether the decay is decoupled (AdamW) instead of an L2 penalty.
        weight_decay: The weight decay. Default: 0.
        amsgrad: Whether the running maximum of the second moment is used.
        set_grad_none: What ``zero_grad()`` does by default: True sets ``.grad`` to None.
        placement: The keywords of ``tensorstow.AdamW`` that place the states.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # upstream's
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,  # noqa: FBT001, FBT002
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,  # noqa: FBT001, FBT002
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        set_grad_none: bool = True,  # noqa: FBT001, FBT002
        **placement: Any,  # noqa: ANN401
    ) -> None:
        """Create the optimizer; the class documents the arguments."""
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=adam_w_mode,
            **placement,
        )
        self._set_grad_none = set_grad_none
        set_bias_correction(self, bias_correction=bias_correction)

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # noqa: FBT001
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
    if not bias_correction:
        optimizer.defaults["bias_correction"] = False
        for group in optimizer.param_groups:
            group["bias_correction"] = False
