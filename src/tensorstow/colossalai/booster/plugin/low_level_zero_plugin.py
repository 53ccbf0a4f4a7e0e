"""``LowLevelZeroPlugin``: ZeRO stages 1 and 2, with states on the device or in host memory."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.colossalai.booster.plugin.place_model import (
    DTYPES,
    Decision,
    PlacementRequest,
    TrainingOptions,
    check_copies,
    place,
    refuse_values,
    tell_idle,
)
from tensorstow.colossalai.booster.plugin.plugin_base import Plugin
from tensorstow.colossalai.grad_scaler import DynamicGradScaler
from tensorstow.colossalai.interface import ModelWrapper
from tensorstow.fsdp.unshard import not_reduced

_REFUSED: Mapping[str, tuple[object, str]] = {
    "norm_type": (2.0, "gradients are clipped by their 2-norm"),
    "use_fp8": (False, 'precisions are "fp32", "bf16" and "fp16"'),
    "fp8_communication": (False, "gradients are reduced in the dtype that is computed in"),
    "cast_inputs": (True, "what goes into forward is cast to the dtype that is computed in"),
}
_IDLE: Mapping[str, tuple[object, str]] = {
    "reduce_bucket_size_in_m": (12, "gradients are reduced by the model's blocks"),
    "overlap_communication": (True, "gradients are always reduced beside backward"),
    "overlap_allgather": (False, "parameters are always gathered beside forward"),
}


class LowLevelZeroPlugin(Plugin):
    """Parameters on the device, whole in forward and backward; gradients and states sharded.

    Args:
        stage: 1 or 2. In both gradients are sharded when they are reduced; under 1 ``no_sync``
            leaves out the reduction.
        precision: As of ``GeminiPlugin``.
        initial_scale: The first loss scale; this and the next six are of fp16.
        min_scale: The least loss scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` good steps.
        backoff_factor: What it is multiplied by at an overflow.
        growth_interval: Good steps in a row until the scale grows.
        hysteresis: Overflows until the scale falls.
        max_scale: The largest loss scale.
        max_norm: As of ``GeminiPlugin``.
        norm_type: 2.
        reduce_bucket_size_in_m: Changes nothing.
        communication_dtype: The dtype that gradients are reduced in; the one that is computed in.
        overlap_communication: Changes nothing.
        overlap_allgather: Changes nothing.
        cpu_offload: Whether states are in host memory, where updates run then.
        master_weights: As of ``GeminiPlugin``.
        verbose: As of ``GeminiPlugin``.
        cast_inputs: Refused unless True.
        fp8_communication: Refused.
        use_fp8: Refused.
        extra_dp_size: How many groups of ranks hold full states each.

    Raises:
        OptionError: An argument that cannot be honoured.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # upstream's own signature
        self,
        stage: int = 1,
        precision: str | None = None,
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: int = 12,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,  # noqa: FBT001, FBT002  # upstream's, all below
        overlap_allgather: bool = False,  # noqa: FBT001, FBT002
        cpu_offload: bool = False,  # noqa: FBT001, FBT002
        master_weights: bool = True,  # noqa: FBT001, FBT002
        verbose: bool = False,  # noqa: FBT001, FBT002
        cast_inputs: bool = True,  # noqa: FBT001, FBT002
        fp8_communication: bool = False,  # noqa: FBT001, FBT002
        use_fp8: bool = False,  # noqa: FBT001, FBT002
        extra_dp_size: int = 1,
    ) -> None:
        """Create the plugin; the class documents the arguments."""
        owner = type(self).__name__
        refuse_values(
            owner,
            _REFUSED,
            norm_type=norm_type,
            use_fp8=use_fp8,
            fp8_communication=fp8_communication,
            cast_inputs=cast_inputs,
        )
        tell_idle(
            owner,
            _IDLE,
            reduce_bucket_size_in_m=reduce_bucket_size_in_m,
            overlap_communication=overlap_communication,
            overlap_allgather=overlap_allgather,
        )
        check_copies(extra_dp_size)
        if stage not in {1, 2}:
            message = f"stage={stage!r} was given: it is 1 or 2. GeminiPlugin is stage 3."
            raise OptionError(message)
        self._stage, self._cpu_offload, self._replicas = stage, cpu_offload, extra_dp_size
        scaler = partial(
            DynamicGradScaler,
            initial_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            min_scale,
            max_scale,
            hysteresis,
        )
        self._training = TrainingOptions(
            precision, scaler, max_norm, master_weights=master_weights, verbose=verbose
        )
        if communication_dtype not in {None, DTYPES[self._training.meant]}:
            message = (
                f"communication_dtype={communication_dtype} was given with"
                f' precision="{self._training.meant}": gradients are reduced in the dtype that is'
                " computed in. Leave it out."
            )
            raise OptionError(message)

    def _place(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        lr_scheduler: Any,  # noqa: ANN401  # torch's, or any object with an optimizer
    ) -> tuple[nn.Module, Optimizer | None]:
        return place(
            model, optimizer, lr_scheduler, self._decide, self._training, replicas=self._replicas
        )

    def support_no_sync(self) -> bool:
        """Return whether ``no_sync`` can be called.

        Returns:
            True under stage 1.
        """
        return self._stage == 1

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced, under stage 1.

        Args:
            model: What ``boost`` returned.
            optimizer: What ``boost`` returned.

        Returns:
            The context manager.

        Raises:
            OptionError: The stage is 2, or the model is another one.
        """
        if self._stage != 1 or not isinstance(model, ModelWrapper):
            return super().no_sync(model, optimizer)
        return not_reduced(model.module)

    def _decide(self, asked: PlacementRequest) -> Decision:
        plan = Plan(
            parameters=Tier.HOST if asked.device_is_host else Tier.DEVICE,
            states=Tier.DISK if asked.states_on_disk else Tier.HOST,
            stage=2,
            replicas=self._replicas,
        )
        every = [name for unit in asked.units for name in unit.parameters]
        return plan, every if self._cpu_offload else ()
