"""``deepspeed.ops.adam``: upstream's signatures over tensorstow's Adam."""

from typing import Any

from torch.optim.optimizer import ParamsT

from tensorstow.base.errors import OptionError
from tensorstow.optim.adam import Adam
from tensorstow.optim.stowed_adam import StowedAdam


class DeepSpeedCPUAdam(Adam):
    """Adam(W) with its states in host memory, or wherever ``placement`` says (see AdamW).

    GivenKey to ``initialize`` it is made anew over the placed model, with the same groups. Unlike
    upstream, ``amsgrad`` works. ``fp32_optimizer_states=False`` is refused: states in fewer bits
    are asked for by their format, ``state_format="bf16"``.
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
        """Make the optimizer; see the class."""
        if not fp32_optimizer_states:
            message = (
                "fp32_optimizer_states=False was given: which bits states lose is said by the"
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
        correct(self, bias_correction=bias_correction)


class FusedAdam(Adam):
    """Adam(W) by upstream's name for accelerators; updates run on the CPU here, with torch's bits.

    ``set_grad_none`` says what ``zero_grad()`` does where it is not told.
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
        """Make the optimizer; see the class."""
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
        correct(self, bias_correction=bias_correction)

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # noqa: FBT001
        """Drop the gradients, or zero them, as ``set_grad_none`` says."""
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)


def correct(optimizer: StowedAdam, *, bias_correction: bool) -> None:
    """Let the moments of every group be corrected for their start, or not."""
    if not bias_correction:
        optimizer.defaults["bias_correction"] = False
        for group in optimizer.param_groups:
            group["bias_correction"] = False
