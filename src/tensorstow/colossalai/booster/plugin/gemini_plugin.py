"""``GeminiPlugin``: ColossalAI's arguments, as a plan of ``tensorstow.stow``."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.colossalai.booster.plugin.placement_policy import (
    PlacementPolicy,
    plan_of,
    states_off_device,
)
from tensorstow.colossalai.booster.plugin.plugin_base import Boosted, Plugin, check_device
from tensorstow.colossalai.grad_scaler import DynamicGradScaler
from tensorstow.colossalai.interface import ModelWrapper, OptimizerWrapper
from tensorstow.colossalai.made_anew import disk_fraction_of, maker_of
from tensorstow.fsdp.made_optimizer import hand_over
from tensorstow.fsdp.sharding import current_device, world_size
from tensorstow.fsdp.stow import stow
from tensorstow.fsdp.units import units_of
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.planner.sizes import Sizes

logger = logging.getLogger("tensorstow")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
"""What changes nothing, whatever it is, and why."""


class GeminiPlugin(Plugin):
    """Parameters, gradients and states over device and host memory, sharded over ranks.

    Every argument of ColossalAI 0.5 is there, with ``device`` of its older versions. None is
    ignored: it is honoured, or it can change nothing here and a log line (INFO) says why, or a
    value other than the default raises an error. Where the CPU computes, device memory is host
    memory, and all placements are the same.

    Args:
        chunk_config_dict: Refused unless None.
        chunk_init_device: Changes nothing.
        placement_policy: "static", by the three fractions; "cuda", all on the device; "cpu", all in
            host memory; "const", the same with at most 512 MiB of parameters on their way to the
            device; "auto".
        enable_gradient_accumulation: Changes nothing: gradients of several backwards add up, in
            fp32.
        max_prefetch: How many units are copied to the device before they are asked for.
        shard_param_frac: 1.0 (ZeRO stage 3) or 0.0 (stage 2).
        offload_optim_frac: The fraction of the states' bytes in host memory: those of the
            parameters whose bytes are nearest to it. The others are updated on the device, by
            torch's fused Adam.
        offload_param_frac: The fraction of the parameters' bytes in host memory, frozen ones
            included: the units whose bytes are nearest to it. At most ``offload_optim_frac``.
        warmup_non_model_data_ratio: Used by "auto" only.
        steady_cuda_cap_ratio: Used by "auto" only.
        precision: "fp32", "bf16" or "fp16": what is computed in. Parameters keep their dtype, so
            those in fp32 are the master weights. Default: None, "fp16" as upstream where an
            accelerator computes, "fp32" where the CPU does.
        master_weights: False is refused unless the precision is the parameters' own.
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
        given = dict(locals())
        refuse_values(given, _REFUSED, type(self).__name__)
        tell_idle(given, _IDLE, type(self).__name__)
        check_device(device)
        self._policy = PlacementPolicy(
            placement_policy, shard_param_frac, offload_optim_frac, offload_param_frac
        )
        self._precision = precision_of(precision)
        self._master_weights = master_weights
        self._max_norm = clipping_of(max_norm)
        self._prefetch, self._replicas = max_prefetch, extra_dp_size
        self._outputs_fp32, self._verbose = force_outputs_fp32, verbose
        # Made in every precision, so that values that cannot be used are told.
        scaler = DynamicGradScaler(
            initial_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            min_scale,
            max_scale,
            hysteresis,
        )
        self._scaler = scaler if self._precision == "fp16" else None

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,  # noqa: ANN401  # torch's, or whatever has an optimizer
    ) -> Boosted:
        """Place the model, as ``Booster.boost`` says.

        Args:
            model: As of ``Booster.boost``.
            optimizer: As of ``Booster.boost``.
            criterion: As of ``Booster.boost``.
            dataloader: As of ``Booster.boost``.
            lr_scheduler: As of ``Booster.boost``.

        Returns:
            As of ``Booster.boost``.

        Raises:
            OptionError: Something cannot be honoured; the model was not changed.
        """
        refuse_boosted(model)
        began = time.perf_counter()
        dtype = compute_dtype_of(model, self._precision, master_weights=self._master_weights)
        units = units_of(model)
        sizes = Sizes.of(units, max(world_size() // self._replicas, 1))
        plan = self._plan(sizes, on_disk=disk_fraction_of(optimizer) > 0)
        below = states_off_device(self._policy, units, plan)
        make = maker_of(optimizer, model, below.__contains__)
        placed, made = stow(model, make, plan=plan, compute_dtype=dtype)
        self._report(plan, sizes, made, time.perf_counter() - began)
        wrapper = OptimizerWrapper(made, max_norm=self._max_norm, scaler=self._scaler)
        if lr_scheduler is not None:
            hand_over(lr_scheduler, wrapper)
        boosted = ModelWrapper(placed, outputs_fp32=self._outputs_fp32)
        return boosted, wrapper, criterion, dataloader, lr_scheduler

    def _plan(self, sizes: Sizes, *, on_disk: bool) -> Plan:
        return plan_of(
            self._policy,
            sizes,
            device_is_host=current_device().type == "cpu",
            states_on_disk=on_disk,
            replicas=self._replicas,
            prefetch=self._prefetch,
        )

    def _report(self, plan: Plan, sizes: Sizes, made: StowedAdam, seconds: float) -> None:
        """Log what upstream logs of its chunks: what is there of what was placed."""
        used = sizes.whole_bytes
        wasted = sizes.share_bytes * sizes.ranks - used if sizes.ranks > 1 else 0
        memory = made.memory()
        level = logging.WARNING if self._verbose else logging.INFO
        below = sum(u.share_bytes for u in sizes.units if plan.tier_of(u.name) == Tier.HOST)
        logger.log(
            level,
            "placing %d units is completed in %.2f s: used %.2f MiB, wasted %.2f MiB (%.2f%%),"
            " %.2f MiB of this rank's parameters in host memory, %.2f MiB of its states there, %.2f"
            " MiB on disk",
            len(sizes.units),
            seconds,
            used / 2**20,
            wasted / 2**20,
            100 * wasted / max(used + wasted, 1),
            below / 2**20,
            memory.ram_bytes / 2**20,
            memory.disk_bytes / 2**20,
        )


def refuse_values(
    given: Mapping[str, Any], refused: Mapping[str, tuple[object, str]], plugin: str
) -> None:
    """Refuse arguments that have to be as they are by default.

    Args:
        given: Values by name.
        refused: The defaults, and why they have to be.
        plugin: The plugin's name.

    Raises:
        OptionError: One is another.
    """
    for name, (default, why) in refused.items():
        if given[name] != default:
            message = (
                f"{name}={given[name]!r} was given to {plugin}: {why}. Leave it out ({default!r})."
            )
            raise OptionError(message)


def tell_idle(
    given: Mapping[str, Any], idle: Mapping[str, tuple[object, str]], plugin: str
) -> None:
    """Log which of the arguments that were given change nothing, and why.

    Args:
        given: Values by name.
        idle: The defaults, and why other values change nothing.
        plugin: The plugin's name.
    """
    for name, (default, why) in idle.items():
        if given[name] != default:
            logger.info("%s: %s=%r changes nothing: %s", plugin, name, given[name], why)


def precision_of(given: str | None) -> str:
    """Return the precision that is meant.

    Args:
        given: "fp32", "bf16", "fp16", or None.

    Returns:
        One of the three; for None "fp16" on an accelerator, "fp32" on the CPU.

    Raises:
        OptionError: It is another.
    """
    if given is None:
        return "fp32" if current_device().type == "cpu" else "fp16"
    if given not in DTYPES:
        known = ", ".join(f'"{name}"' for name in DTYPES)
        message = f"precision={given!r} was given: it is one of {known}."
        raise OptionError(message)
    return given


def clipping_of(max_norm: float) -> float:
    """Return the norm that gradients are clipped to; 0: not at all.

    Args:
        max_norm: The norm.

    Returns:
        The same.

    Raises:
        OptionError: It is negative or no number.
    """
    if not max_norm >= 0.0:
        message = f"max_norm={max_norm} was given: it is 0 (no clipping) or positive."
        raise OptionError(message)
    return float(max_norm)


def refuse_boosted(model: nn.Module) -> None:
    """Refuse a model that ``boost`` returned.

    Args:
        model: The model.

    Raises:
        OptionError: It was placed before.
    """
    if isinstance(model, ModelWrapper):
        message = "boost() was given a model that it has returned: boost a model once."
        raise OptionError(message)


def compute_dtype_of(
    model: nn.Module, precision: str, *, master_weights: bool
) -> torch.dtype | None:
    """Return what a model's parameters are cast to in forward and backward.

    Args:
        model: The model.
        precision: "fp32", "bf16" or "fp16".
        master_weights: Whether fp32 master weights are kept.

    Returns:
        The dtype; None: every parameter is of it.

    Raises:
        OptionError: ``master_weights`` is False where parameters are cast.
    """
    dtype = DTYPES[precision]
    others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {dtype}
    if not others:
        return None
    if not master_weights:
        message = (
            f'master_weights=False was given with precision="{precision}" and parameters in'
            f" {', '.join(sorted(map(str, others)))}, which are the master weights. Leave it out,"
            f" or cast the model to {dtype} first, whose states keep what a weight lacks."
        )
        raise OptionError(message)
    return dtype
