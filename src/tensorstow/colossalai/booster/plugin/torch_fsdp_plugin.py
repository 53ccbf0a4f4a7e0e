"""``TorchFSDPPlugin``: torch's FSDP1 arguments, by FSDP2 as ``stow`` uses it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.colossalai.booster.plugin.place_model import (
    DTYPES,
    Decision,
    PlacementRequest,
    TrainingOptions,
    place,
    refuse_values,
    tell_idle,
)
from tensorstow.colossalai.booster.plugin.plugin_base import Plugin

_REFUSED: Mapping[str, tuple[object, str]] = {
    "process_group": (None, "the ranks are all there are; tensorstow.stow(mesh=) takes others"),
    "auto_wrap_policy": (None, "units are the model's repeated blocks; tensorstow.stow(units=)"),
    "ignored_modules": (None, "every parameter of the model is sharded"),
    "fp8_communication": (False, "gradients are reduced in the dtype that is computed in"),
}
_IDLE: Mapping[str, tuple[object, str]] = {
    "backward_prefetch": (None, "FSDP2 gathers the next unit beside backward in any case"),
    "sync_module_states": (False, "every rank starts with the values of rank 0 in any case"),
}
_STAGES = {
    None: 3,
    ShardingStrategy.FULL_SHARD: 3,
    ShardingStrategy.SHARD_GRAD_OP: 2,
    ShardingStrategy.NO_SHARD: 0,
}


class TorchFSDPPlugin(Plugin):
    """Parameters, gradients and states sharded over all ranks, by FSDP2.

    Args:
        process_group: Refused unless None.
        sharding_strategy: FULL_SHARD (the default), SHARD_GRAD_OP or NO_SHARD.
        cpu_offload: ``CPUOffload(offload_params=True)``: parameters and states in host memory.
        auto_wrap_policy: Refused unless None.
        backward_prefetch: Changes nothing.
        mixed_precision: Of it ``param_dtype``; other dtypes must be the same or None, and
            ``cast_forward_inputs`` True for the whole model.
        ignored_modules: Refused unless None.
        param_init_fn: Sets the first values of a module on the meta device, as ``init`` of
            ``stow``.
        sync_module_states: Changes nothing.
        fp8_communication: Refused.

    Raises:
        OptionError: An argument that cannot be honoured.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # upstream's own signature
        self,
        process_group: object = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | None = None,
        backward_prefetch: BackwardPrefetch | None = None,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = False,  # noqa: FBT001, FBT002  # upstream's
        fp8_communication: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Create the plugin; the class documents the arguments."""
        owner = type(self).__name__
        refuse_values(
            owner,
            _REFUSED,
            process_group=process_group,
            auto_wrap_policy=auto_wrap_policy,
            ignored_modules=ignored_modules,
            fp8_communication=fp8_communication,
        )
        tell_idle(
            owner,
            _IDLE,
            backward_prefetch=backward_prefetch,
            sync_module_states=sync_module_states,
        )
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

    def _place(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        lr_scheduler: Any,  # noqa: ANN401  # torch's, or any object with an optimizer
    ) -> tuple[nn.Module, Optimizer | None]:
        return place(model, optimizer, lr_scheduler, self._decide, self._training, init=self._init)

    def _decide(self, asked: PlacementRequest) -> Decision:
        below = self._on_host or asked.device_is_host
        plan = Plan(
            parameters=Tier.HOST if below else Tier.DEVICE,
            states=Tier.DISK if asked.states_on_disk else Tier.HOST,
            stage=self._stage,
        )
        return plan, ()


def _precision_of(given: MixedPrecision | None) -> str:
    """Return the precision that is meant; raises OptionError for dtypes that differ."""
    if given is None:
        return "fp32"
    known = {dtype: name for name, dtype in DTYPES.items()}
    computed = given.param_dtype or torch.float32
    if (
        computed not in known
        or given.reduce_dtype not in {None, given.param_dtype}
        or given.buffer_dtype is not None
        or given.keep_low_precision_grads
        or not given.cast_root_forward_inputs
    ):
        message = (
            f"mixed_precision={given} was given: param_dtype is float32, bfloat16 or float16,"
            " reduce_dtype the same or None, buffer_dtype None, and inputs are cast."
        )
        raise OptionError(message)
    return known[computed]
