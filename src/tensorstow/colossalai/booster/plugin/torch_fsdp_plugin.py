"""``TorchFSDPPlugin``: torch's FSDP1 arguments, by FSDP2 as ``stow`` uses it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.colossalai.booster.plugin.place_model import (
    PRECISIONS,
    Decision,
    PlacementRequest,
    PlacingPlugin,
    TrainingOptions,
)
from tensorstow.doorkit.keyword_table import Table, checks_keywords, honoured, no_effect, refused

_TABLE: Table = {
    **refused("the ranks are all there are; tensorstow.stow(mesh=) takes others", "process_group"),
    "sharding_strategy": honoured("FULL_SHARD (the default), SHARD_GRAD_OP or NO_SHARD."),
    "cpu_offload": honoured(
        "``CPUOffload(offload_params=True)``: parameters and states in host memory."
    ),
    **refused("units are the model's repeated blocks; tensorstow.stow(units=)", "auto_wrap_policy"),
    **no_effect("FSDP2 gathers the next unit during backward in any case", "backward_prefetch"),
    "mixed_precision": honoured(
        "Of it ``param_dtype``; other dtypes must be the same or None, and ``cast_forward_inputs``"
        " True for the whole model."
    ),
    **refused("every parameter of the model is sharded", "ignored_modules"),
    "param_init_fn": honoured(
        "Sets the first values of a module on the meta device, as ``init`` of ``stow``."
    ),
    **no_effect("every rank starts with the values of rank 0 in any case", "sync_module_states"),
    **refused("gradients are reduced in the dtype that is computed in", "fp8_communication"),
}
_STAGES = {
    None: 3,
    ShardingStrategy.FULL_SHARD: 3,
    ShardingStrategy.SHARD_GRAD_OP: 2,
    ShardingStrategy.NO_SHARD: 0,
}


@checks_keywords(_TABLE)
class TorchFSDPPlugin(PlacingPlugin):
    """Parameters, gradients and states sharded over all ranks, by FSDP2."""

    def __init__(
        self,
        process_group: object = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | None = None,
        backward_prefetch: BackwardPrefetch | None = None,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = False,
        fp8_communication: bool = False,
    ) -> None:
        if sharding_strategy not in _STAGES:
            message = (
                f"sharding_strategy={sharding_strategy} was given: it is FULL_SHARD, SHARD_GRAD_OP"
                " or NO_SHARD. GeminiPlugin(extra_dp_size=) has several full copies."
            )
            raise OptionError(message)
        self._stage = _STAGES[sharding_strategy]
        self._on_host = cpu_offload is not None and cpu_offload.offload_params
        casts = mixed_precision is not None and mixed_precision.param_dtype is not None
        self._training = TrainingOptions(_precision_of(mixed_precision), casts=casts)
        self._init = param_init_fn

    def _decide(self, asked: PlacementRequest) -> Decision:
        below = self._on_host or asked.device_is_host
        plan = Plan(
            parameters=Tier.HOST if below else Tier.DEVICE,
            states=asked.states,
            stage=self._stage,
        )
        return plan, ()


def _precision_of(precision: MixedPrecision | None) -> str:
    """Return the precision of these dtypes; raises OptionError if they differ."""
    if precision is None:
        return "fp32"
    computed = precision.param_dtype or torch.float32
    if (
        computed not in PRECISIONS
        or precision.reduce_dtype not in {None, precision.param_dtype}
        or precision.buffer_dtype is not None
        or precision.keep_low_precision_grads
        or not precision.cast_root_forward_inputs
    ):
        message = (
            f"mixed_precision={precision} was given: param_dtype is float32, bfloat16 or float16,"
            " reduce_dtype the same or None, buffer_dtype None, and inputs are cast."
        )
        raise OptionError(message)
    return PRECISIONS[computed]
