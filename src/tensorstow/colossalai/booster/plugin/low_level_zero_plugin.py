"""``LowLevelZeroPlugin``: ZeRO stages 1 and 2, with states on the device or in host memory."""

from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.base.fields import PositiveInt, read_value
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.colossalai.booster.plugin.gemini_plugin import PLACEMENT, PRECISION
from tensorstow.colossalai.booster.plugin.place_model import (
    DTYPES,
    Decision,
    PlacementRequest,
    PlacingPlugin,
    TrainingOptions,
)
from tensorstow.colossalai.grad_scaler import LOSS_SCALE, DynamicGradScaler
from tensorstow.colossalai.interface import ModelWrapper
from tensorstow.doorkit.keyword_table import Table, checks_keywords, honoured, no_effect, refused
from tensorstow.fsdp.unshard import not_reduced

_SHARED = ("master_weights", "verbose", "use_fp8", "fp8_communication")
_TABLE: Table = {
    **PRECISION,
    **{name: PLACEMENT[name] for name in _SHARED},
    "stage": honoured(
        "1 or 2. In both gradients are sharded when they are reduced; under 1 ``no_sync`` leaves"
        " out the reduction."
    ),
    **no_effect("gradients are reduced by the model's blocks", "reduce_bucket_size_in_m"),
    "communication_dtype": honoured(
        "The dtype that gradients are reduced in; the one that is computed in."
    ),
    **no_effect("gradients are always reduced during backward", "overlap_communication"),
    **no_effect("parameters are always gathered during forward", "overlap_allgather"),
    "cpu_offload": honoured("Whether states are in host memory, where updates run then."),
    **refused("what goes into forward is cast to the dtype that is computed in", "cast_inputs"),
    "extra_dp_size": honoured("How many groups of ranks hold full states each."),
}


@checks_keywords(_TABLE)
class LowLevelZeroPlugin(PlacingPlugin):
    """Parameters on the device, whole in forward and backward; gradients and states sharded."""

    def __init__(
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
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        master_weights: bool = True,
        verbose: bool = False,
        cast_inputs: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        extra_dp_size: int = 1,
    ) -> None:
        arguments = locals()
        read_value(PositiveInt, extra_dp_size, "extra_dp_size")
        if stage not in {1, 2}:
            message = f"stage={stage!r} was given: it is 1 or 2. GeminiPlugin is stage 3."
            raise OptionError(message)
        self._stage, self._cpu_offload, self._replicas = stage, cpu_offload, extra_dp_size
        scaler = partial(DynamicGradScaler, **{name: arguments[name] for name in LOSS_SCALE})
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

    def support_no_sync(self) -> bool:
        """Return whether ``no_sync`` can be called: under stage 1."""
        return self._stage == 1

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced, under stage 1.

        Raises:
            OptionError: The stage is 2, or the model is another one.
        """
        if self._stage != 1 or not isinstance(model, ModelWrapper):
            return super().no_sync(model, optimizer)
        return not_reduced(model.module)

    def _decide(self, asked: PlacementRequest) -> Decision:
        plan = Plan(
            parameters=Tier.HOST if asked.device_is_host else Tier.DEVICE,
            states=asked.states,
            stage=2,
            replicas=self._replicas,
        )
        every = [name for unit in asked.units for name in unit.parameters]
        return plan, every if self._cpu_offload else ()
