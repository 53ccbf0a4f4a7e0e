"""``GeminiPlugin``: ColossalAI's arguments, as a plan of ``tensorstow.stow``."""

from functools import partial
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.fields import PositiveInt, Share, read_value, whole_number
from tensorstow.colossalai.booster.plugin.place_model import (
    Decision,
    PlacementRequest,
    PlacingPlugin,
    TrainingOptions,
)
from tensorstow.colossalai.booster.plugin.placement_policy import (
    PlacementPolicy,
    plan_of,
    states_off_device,
)
from tensorstow.colossalai.booster.plugin.plugin_base import check_device
from tensorstow.colossalai.gemini import GeminiModel, GeminiStates
from tensorstow.colossalai.grad_scaler import LOSS_SCALE, DynamicGradScaler
from tensorstow.doorkit.keyword_table import (
    Table,
    checks_keywords,
    honoured,
    log_without_effect,
    no_effect,
    refused,
)
from tensorstow.fsdp.h2d_prefetch import h2d_prefetcher_of

_FIXED_BLOCKS = "parameters move by the model's blocks, and no chunk size is searched"
_SAME_MODULES = "modules are not replaced by faster ones"
_OF_COPIES = 'it is for copies that stay on an accelerator under placement_policy="auto"'
PLACEMENT: Table = {
    **refused(f"{_FIXED_BLOCKS}. tensorstow.stow(units=) names other blocks", "chunk_config_dict"),
    **refused("there is no tracer whose statistics it could be", "memstats"),
    **refused('precisions are "fp32", "bf16" and "fp16"', "use_fp8"),
    **refused("gradients are reduced in the dtype that is computed in", "fp8_communication"),
    **no_effect(_FIXED_BLOCKS, "search_range_m", "hidden_dim", "min_chunk_size_m"),
    **no_effect("weights are read in place", "chunk_init_device"),
    **no_effect("all parallelism is data-parallel", "strict_ddp_mode"),
    **no_effect("gradients are always reduced during backward", "enable_async_reduce"),
    **no_effect(
        "host memory that an accelerator copies from is pinned in any case, within the limit"
        " TENSORSTOW_PINNED_LIMIT",
        "pin_memory",
    ),
    **no_effect(
        "gradients of several backwards always add up, in fp32 where the CPU updates",
        "enable_gradient_accumulation",
    ),
    "placement_policy": honoured(
        '"static", by the three fractions; "cuda", all on the device; "cpu", all in host memory;'
        ' "const", the same with at most 512 MiB of parameters on their way to the device; "auto",'
        " all in host memory, and copies of parameters stay on the device from forward to backward"
        " while there is room: units are chosen anew when a step has measured what activations"
        " take, and each change is logged."
    ),
    "max_prefetch": honoured("How many units are copied to the device ahead of use."),
    "shard_param_frac": honoured(
        "The fraction of the parameters' bytes that is sharded between forward and backward too:"
        " 1.0 is ZeRO stage 3, 0.0 is stage 2; between, the others are those of the units whose"
        " bytes are nearest to the rest."
    ),
    "offload_optim_frac": honoured(
        "The fraction of the states' bytes in host memory: those of the parameters whose bytes are"
        " nearest to it. The others are updated on the device, by torch's fused Adam."
    ),
    "offload_param_frac": honoured(
        "The fraction of the parameters' bytes in host memory, frozen ones included: the units"
        " whose bytes are nearest to it. At most ``offload_optim_frac``."
    ),
    "warmup_non_model_data_ratio": honoured(
        'Under "auto", the part of the device\'s memory that is left to everything else until two'
        " steps are measured."
    ),
    "steady_cuda_cap_ratio": honoured(
        'Under "auto", the part of the device\'s memory that copies and everything else may take'
        " together."
    ),
    "force_outputs_fp32": honoured("Whether floating point outputs of the model are cast to fp32."),
    "master_weights": honoured(
        "False casts the parameters to the precision for good. States in host memory and on disk"
        " keep what a 16-bit weight lacks, so its updates are not lost."
    ),
    "verbose": honoured(
        "Whether the report on the placement is a warning rather than information."
    ),
}
"""The keywords that place a model, which ``GeminiDDP`` has too."""
PRECISION: Table = {
    "precision": honoured(
        '"fp32", "bf16" or "fp16": what is computed in. Parameters keep their dtype, so those in'
        ' fp32 are the master weights. Default: None, "fp16" as upstream where an accelerator'
        ' computes, "fp32" where the CPU does.'
    ),
    **LOSS_SCALE,
    "max_norm": honoured("The 2-norm that gradients are clipped to, in every precision; 0: none."),
    **refused("gradients are clipped by their 2-norm", "norm_type"),
}
"""The keywords of training that plugins share."""
_TABLE: Table = {
    **PLACEMENT,
    **PRECISION,
    **refused("states stay where the policy places them", "gpu_margin_mem_ratio"),
    **refused(
        "models are sharded over data-parallel ranks, and their layers are not cut", "tp_size"
    ),
    **refused(
        _SAME_MODULES, "enable_all_optimization", "enable_fused_normalization", "enable_jit_fused"
    ),
    **refused("choose attention in the model's own configuration", "enable_flash_attention"),
    **refused("there is no tensor parallelism to extend", "enable_sequence_parallelism"),
    "extra_dp_size": honoured("How many groups of ranks hold a full copy each."),
    "device": honoured("The device of this rank."),
}


@checks_keywords(_TABLE)
class GeminiPlugin(PlacingPlugin):
    """Parameters, gradients and states over device and host memory, sharded over ranks.

    Every argument of ColossalAI 0.5 is there, with ``device`` of its older versions. None is
    ignored: it is honoured, or it has no effect here and a log line (WARNING) gives the reason, or
    a value other than the default raises an error. Where the CPU computes, device memory is host
    memory, and all placements are the same.
    """

    _wrappers = (GeminiModel, GeminiStates)

    def __init__(
        self,
        chunk_config_dict: dict[Any, Any] | None = None,
        chunk_init_device: torch.device | str | int | None = None,
        placement_policy: str = "static",
        enable_gradient_accumulation: bool = False,
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        precision: str | None = None,
        master_weights: bool = True,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_m: int = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        memstats: object = None,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_size: int = 1,
        extra_dp_size: int = 1,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_sequence_parallelism: bool = False,
        enable_jit_fused: bool = False,
        enable_async_reduce: bool = True,
        use_fp8: bool = False,
        verbose: bool = False,
        fp8_communication: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        arguments = locals()
        read_value(PositiveInt, extra_dp_size, "extra_dp_size")
        check_device(device)
        self._policy = PlacementPolicy(
            placement_policy, shard_param_frac, offload_optim_frac, offload_param_frac
        )
        read_value(Annotated[int, whole_number(0)], max_prefetch, "max_prefetch")
        self._prefetch, self._replicas = max_prefetch, extra_dp_size
        for name in ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio"):
            read_value(Share, arguments[name], name)
        self._limit_part, self._assumed_part = steady_cuda_cap_ratio, warmup_non_model_data_ratio
        scaler = partial(DynamicGradScaler, **{name: arguments[name] for name in LOSS_SCALE})
        self._training = TrainingOptions(
            precision,
            scaler,
            max_norm,
            master_weights=master_weights,
            outputs_fp32=force_outputs_fp32,
            verbose=verbose,
        )

    def _place(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any
    ) -> tuple[nn.Module, Optimizer | None]:
        placed, wrapper = super()._place(model, optimizer, lr_scheduler)
        h2d_prefetcher = h2d_prefetcher_of(placed)
        if h2d_prefetcher is not None and h2d_prefetcher.cache is not None:
            # Until a step is measured the rest of the device, up to the limit, is for copies.
            assumed = max(0.0, self._limit_part + self._assumed_part - 1.0)
            h2d_prefetcher.cache.assume(_device_bytes(assumed))
        return placed, wrapper

    def _decide(self, asked: PlacementRequest) -> Decision:
        if asked.device_is_host or self._policy.name != "auto":
            log_without_effect(
                type(self),
                _OF_COPIES,
                warmup_non_model_data_ratio=self._assumed_part,
                steady_cuda_cap_ratio=self._limit_part,
            )
        plan = plan_of(
            self._policy,
            asked,
            replicas=self._replicas,
            prefetch=self._prefetch,
            device_budget=0 if asked.device_is_host else _device_bytes(self._limit_part),
        )
        return plan, states_off_device(self._policy, asked.units, plan)


def _device_bytes(part: float) -> int:
    """Return a part of the device's memory, the same on every rank of its kind."""
    _, total = torch.accelerator.get_memory_info()
    return int(total * part)
