"""``GeminiPlugin``: ColossalAI's arguments, as a plan of ``tensorstow.stow``."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.booster.plugin.place_model import (
    Decision,
    PlacementRequest,
    TrainingOptions,
    check_copies,
    place,
    refuse_values,
    tell_idle,
)
from tensorstow.colossalai.booster.plugin.placement_policy import (
    PlacementPolicy,
    plan_of,
    states_off_device,
)
from tensorstow.colossalai.booster.plugin.plugin_base import Plugin, check_device
from tensorstow.colossalai.gemini import GeminiModel, GeminiStates
from tensorstow.colossalai.grad_scaler import DynamicGradScaler
from tensorstow.fsdp.h2d_prefetch import h2d_prefetcher_of

_FIXED_BLOCKS = "parameters move by the model's blocks, and no chunk size is searched"
_REFUSED: Mapping[str, tuple[object, str]] = {
    "chunk_config_dict": (None, f"{_FIXED_BLOCKS}. tensorstow.stow(units=) names other blocks"),
    "memstats": (None, "there is no tracer whose statistics it could be"),
    "tp_size": (1, "models are sharded over data-parallel ranks, and their layers are not cut"),
    "enable_all_optimization": (False, "modules are not exchanged for faster ones"),
    "enable_fused_normalization": (False, "modules are not exchanged for faster ones"),
    "enable_flash_attention": (False, "choose attention in the model's own configuration"),
    "enable_sequence_parallelism": (False, "there is no tensor parallelism to extend"),
    "enable_jit_fused": (False, "modules are not exchanged for faster ones"),
    "use_fp8": (False, 'precisions are "fp32", "bf16" and "fp16"'),
    "fp8_communication": (False, "gradients are reduced in the dtype that is computed in"),
    "gpu_margin_mem_ratio": (0.0, "states stay where the policy places them"),
    "norm_type": (2.0, "gradients are clipped by their 2-norm"),
}
"""What has to be as it is by default, and why."""
_IDLE: Mapping[str, tuple[object, str]] = {
    "hidden_dim": (None, _FIXED_BLOCKS),
    "search_range_m": (32, _FIXED_BLOCKS),
    "min_chunk_size_m": (32, _FIXED_BLOCKS),
    "chunk_init_device": (None, "weights are read from where the model has them"),
    "strict_ddp_mode": (False, "all parallelism is data-parallel"),
    "enable_async_reduce": (True, "gradients are always reduced beside backward"),
    "pin_memory": (False, "host memory that an accelerator copies from is pinned in any case"),
    "enable_gradient_accumulation": (False, "gradients of several backwards always add up"),
}
"""Arguments without effect, and the reason."""
_OF_COPIES = 'it is for copies that stay on an accelerator under placement_policy="auto"'
_IDLE_WITHOUT_COPIES: Mapping[str, tuple[object, str]] = {
    "warmup_non_model_data_ratio": (0.8, _OF_COPIES),
    "steady_cuda_cap_ratio": (0.9, _OF_COPIES),
}
"""Arguments without effect under other policies, and where the CPU computes."""


class GeminiPlugin(Plugin):
    """Parameters, gradients and states over device and host memory, sharded over ranks.

    Every argument of ColossalAI 0.5 is there, with ``device`` of its older versions. None is
    ignored: it is honoured, or it has no effect here and a log line (WARNING) gives the reason, or
    a value other than the default raises an error. Where the CPU computes, device memory is host
    memory, and all placements are the same.

    Args:
        chunk_config_dict: Refused unless None.
        chunk_init_device: Changes nothing.
        placement_policy: "static", by the three fractions; "cuda", all on the device; "cpu", all in
            host memory; "const", the same with at most 512 MiB of parameters on their way to the
            device; "auto", all in host memory, and copies of parameters stay on the device from
            forward to backward while there is room: units are chosen anew when a step has measured
            what activations take, and each change is logged.
        enable_gradient_accumulation: Changes nothing: gradients of several backwards add up, in
            fp32 where the CPU updates, in the parameter's dtype where the device does.
        max_prefetch: How many units are copied to the device ahead of use.
        shard_param_frac: The fraction of the parameters' bytes that is sharded between forward and
            backward too: 1.0 is ZeRO stage 3, 0.0 is stage 2; between, the others are those of the
            units whose bytes are nearest to the rest.
        offload_optim_frac: The fraction of the states' bytes in host memory: those of the
            parameters whose bytes are nearest to it. The others are updated on the device, by
            torch's fused Adam.
        offload_param_frac: The fraction of the parameters' bytes in host memory, frozen ones
            included: the units whose bytes are nearest to it. At most ``offload_optim_frac``.
        warmup_non_model_data_ratio: Under "auto", the part of the device's memory that is left to
            everything else until two steps are measured.
        steady_cuda_cap_ratio: Under "auto", the part of the device's memory that copies and
            everything else may take together.
        precision: "fp32", "bf16" or "fp16": what is computed in. Parameters keep their dtype, so
            those in fp32 are the master weights. Default: None, "fp16" as upstream where an
            accelerator computes, "fp32" where the CPU does.
        master_weights: False casts the parameters to the precision for good. States in host memory
            and on disk keep what a 16-bit weight lacks, so its updates are not lost.
        pin_memory: Changes nothing: host memory is pinned for an accelerator, within the limit
            ``TENSORSTOW_PINNED_LIMIT`` (docs/guides/whole-models.md).
        force_outputs_fp32: Whether floating point outputs of the model are cast to fp32.
        strict_ddp_mode: Changes nothing.
        search_range_m: Changes nothing.
        hidden_dim: Changes nothing.
        min_chunk_size_m: Changes nothing.
        memstats: Refused unless None.
        gpu_margin_mem_ratio: Refused unless 0.
        initial_scale: The first loss scale; this and the next six are of fp16.
        min_scale: The least loss scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` good steps.
        backoff_factor: What it is multiplied by at an overflow.
        growth_interval: Good steps in a row until the scale grows.
        hysteresis: Overflows until the scale falls.
        max_scale: The largest loss scale.
        max_norm: The 2-norm that gradients are clipped to, in every precision; 0: not at all.
        norm_type: 2.
        tp_size: Refused unless 1.
        extra_dp_size: How many groups of ranks hold a full copy each.
        enable_all_optimization: Refused.
        enable_fused_normalization: Refused.
        enable_flash_attention: Refused.
        enable_sequence_parallelism: Refused.
        enable_jit_fused: Refused.
        enable_async_reduce: Changes nothing.
        use_fp8: Refused.
        verbose: Whether the report on the placement is a warning rather than information.
        fp8_communication: Refused.
        device: The device of this rank.

    Raises:
        OptionError: An argument that cannot be honoured.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # upstream's own signature
        self,
        chunk_config_dict: dict[Any, Any] | None = None,
        chunk_init_device: torch.device | str | int | None = None,
        placement_policy: str = "static",
        enable_gradient_accumulation: bool = False,  # noqa: FBT001, FBT002  # upstream's, all below
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        precision: str | None = None,
        master_weights: bool = True,  # noqa: FBT001, FBT002
        pin_memory: bool = False,  # noqa: FBT001, FBT002
        force_outputs_fp32: bool = False,  # noqa: FBT001, FBT002
        strict_ddp_mode: bool = False,  # noqa: FBT001, FBT002
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
        enable_all_optimization: bool = False,  # noqa: FBT001, FBT002
        enable_fused_normalization: bool = False,  # noqa: FBT001, FBT002
        enable_flash_attention: bool = False,  # noqa: FBT001, FBT002
        enable_sequence_parallelism: bool = False,  # noqa: FBT001, FBT002
        enable_jit_fused: bool = False,  # noqa: FBT001, FBT002
        enable_async_reduce: bool = True,  # noqa: FBT001, FBT002
        use_fp8: bool = False,  # noqa: FBT001, FBT002
        verbose: bool = False,  # noqa: FBT001, FBT002
        fp8_communication: bool = False,  # noqa: FBT001, FBT002
        device: torch.device | str | int | None = None,
    ) -> None:
        """Create the plugin; the class documents the arguments."""
        owner = type(self).__name__
        refuse_values(
            owner,
            _REFUSED,
            chunk_config_dict=chunk_config_dict,
            memstats=memstats,
            tp_size=tp_size,
            enable_all_optimization=enable_all_optimization,
            enable_fused_normalization=enable_fused_normalization,
            enable_flash_attention=enable_flash_attention,
            enable_sequence_parallelism=enable_sequence_parallelism,
            enable_jit_fused=enable_jit_fused,
            use_fp8=use_fp8,
            fp8_communication=fp8_communication,
            gpu_margin_mem_ratio=gpu_margin_mem_ratio,
            norm_type=norm_type,
        )
        tell_idle(
            owner,
            _IDLE,
            hidden_dim=hidden_dim,
            search_range_m=search_range_m,
            min_chunk_size_m=min_chunk_size_m,
            chunk_init_device=chunk_init_device,
            strict_ddp_mode=strict_ddp_mode,
            enable_async_reduce=enable_async_reduce,
            pin_memory=pin_memory,
            enable_gradient_accumulation=enable_gradient_accumulation,
        )
        check_copies(extra_dp_size)
        check_device(device)
        self._policy = PlacementPolicy(
            placement_policy, shard_param_frac, offload_optim_frac, offload_param_frac
        )
        if max_prefetch < 0:
            message = f"max_prefetch={max_prefetch} was given: it is a number of units, at least 0."
            raise OptionError(message)
        self._prefetch, self._replicas = max_prefetch, extra_dp_size
        for name, part in (
            ("warmup_non_model_data_ratio", warmup_non_model_data_ratio),
            ("steady_cuda_cap_ratio", steady_cuda_cap_ratio),
        ):
            if not 0.0 <= part <= 1.0:
                message = f"{name}={part} was given: it is a number between 0 and 1."
                raise OptionError(message)
        self._limit_part, self._assumed_part = steady_cuda_cap_ratio, warmup_non_model_data_ratio
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
            precision,
            scaler,
            max_norm,
            master_weights=master_weights,
            outputs_fp32=force_outputs_fp32,
            verbose=verbose,
        )

    def _place(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        lr_scheduler: Any,  # noqa: ANN401  # torch's, or any object with an optimizer
    ) -> tuple[nn.Module, Optimizer | None]:
        placed, made = place(
            model,
            optimizer,
            lr_scheduler,
            self._decide,
            self._training,
            replicas=self._replicas,
            wrappers=(GeminiModel, GeminiStates),
        )
        h2d_prefetcher = h2d_prefetcher_of(placed)
        if h2d_prefetcher is not None and h2d_prefetcher.cache is not None:
            # Until a step is measured the rest of the device, up to the limit, is for copies.
            assumed = max(0.0, self._limit_part + self._assumed_part - 1.0)
            h2d_prefetcher.cache.assume(_device_bytes(assumed))
        return placed, made

    def _decide(self, asked: PlacementRequest) -> Decision:
        if asked.device_is_host or self._policy.name != "auto":
            tell_idle(
                type(self).__name__,
                _IDLE_WITHOUT_COPIES,
                warmup_non_model_data_ratio=self._assumed_part,
                steady_cuda_cap_ratio=self._limit_part,
            )
        plan = plan_of(
            self._policy,
            asked.sizes,
            device_is_host=asked.device_is_host,
            states_on_disk=asked.states_on_disk,
            replicas=self._replicas,
            prefetch=self._prefetch,
            device_limit=0 if asked.device_is_host else _device_bytes(self._limit_part),
        )
        return plan, states_off_device(self._policy, asked.units, plan)


def _device_bytes(part: float) -> int:
    """Return a part of the device's memory, the same on every rank of its kind."""
    _, total = torch.accelerator.get_memory_info()
    return int(total * part)
