"""``read_settings``: checks a configuration as a whole, and returns ``Settings``."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.json_text import Source, load
from tensorstow.deepspeed.config.settings import (
    ActivationCheckpointing,
    Aio,
    Batch,
    Fp16,
    MonitorFiles,
    Named,
    OffloadOptimizer,
    OffloadParam,
    Settings,
    WandbMonitor,
    Zero,
)
from tensorstow.deepspeed.config.values import given_keys, older_names, say_once, values_of

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_SHARDS_PARAMETERS = 3
Values = Mapping[str, Any]


def read_settings(source: Source, world: int, *, fill: Mapping[str, Any] | None = None) -> Settings:
    """Read a configuration for ``world`` data-parallel ranks; raises OptionError.

    ``source`` is a file or a dict. ``fill`` has values for "auto", by path:
    ``{"optimizer.params.lr": 1e-4}``. Keys without a meaning here are logged once.
    """
    if world < 1:
        message = f"world={world} was given: it must be at least 1."
        raise OptionError(message)
    keys = given_keys(load(source))
    values = values_of(keys, fill or {})
    older = older_names(keys)
    if older:
        say_once(f"deprecated names in the DeepSpeed configuration: {', '.join(older)}")
    if not any(one.key.path == "gradient_clipping" for one in keys):
        say_once(
            "gradient_clipping is absent and nothing is clipped, as in DeepSpeed before 0.19:"
            ' write "gradient_clipping": 1.0 for what it does since'
        )
    refuse_two_precisions(values)
    settings = _settings(values, world)
    check_conflicts(settings, world)
    return settings


def _settings(values: Values, world: int) -> Settings:
    return Settings(
        batch=batch_of(
            values["train_batch_size"],
            values["train_micro_batch_size_per_gpu"],
            values["gradient_accumulation_steps"],
            world,
        ),
        managed_accumulation=values["managed_gradient_accumulation"],
        sums_gradients=values["gradient_allreduce_op"] == "sum",
        optimizer=_named(values, "optimizer"),
        allows_untested_optimizer=values["zero_allow_untested_optimizer"],
        scheduler=_named(values, "scheduler"),
        fp16=_fp16(values),
        bf16=values["bf16.enabled"],
        check_grad_overflow=values["bf16.enabled"] and values["bf16.check_grad_overflow"],
        autocast=_autocast(values),
        load_universal=values["checkpoint.load_universal"],
        gradient_clipping=values["gradient_clipping"],
        zero=_zero(values),
        aio=Aio(
            values["aio.block_size"], values["aio.queue_depth"], values["aio.intra_op_parallelism"]
        ),
        activation_checkpointing=ActivationCheckpointing(
            **_fields(ActivationCheckpointing, "activation_checkpointing", values)
        ),
        steps_per_print=values["steps_per_print"],
        wall_clock_breakdown=values["wall_clock_breakdown"],
        log_level=values["log_level"],
        tensorboard=MonitorFiles(**_fields(MonitorFiles, "tensorboard", values)),
        csv_monitor=MonitorFiles(**_fields(MonitorFiles, "csv_monitor", values)),
        wandb=WandbMonitor(**_fields(WandbMonitor, "wandb", values)),
        dataloader_drop_last=values["dataloader_drop_last"],
    )


def _fp16(values: Values) -> Fp16 | None:
    """Return the loss scale; raises OptionError for numbers that a dynamic one cannot have."""
    if not values["fp16.enabled"]:
        return None
    fp16 = Fp16(**_fields(Fp16, "fp16", values))
    if fp16.loss_scale == 0.0:  # a static scale ignores them, as upstream
        if fp16.loss_scale_window < 1:
            message = (
                f"fp16.loss_scale_window={fp16.loss_scale_window} was given: it must be a whole"
                " number, at least 1."
            )
            raise OptionError(message)
        if fp16.min_loss_scale <= 0.0:
            message = f"fp16.min_loss_scale={fp16.min_loss_scale} was given: it must be above 0."
            raise OptionError(message)
    return fp16


def _autocast(values: Values) -> torch.dtype | None:
    """Return the dtype of ``torch_autocast``; raises OptionError for one that cannot be."""
    if not values["torch_autocast.enabled"]:
        return None
    dtype = values["torch_autocast.dtype"]
    if values["fp16.enabled"] or values["bf16.enabled"]:
        message = (
            "torch_autocast.enabled is true with bf16 or fp16: parameters are fp32 under"
            " torch_autocast. Keep one of both."
        )
        raise OptionError(message)
    if dtype not in {None, "bf16", "bfloat16", "torch.bfloat16"}:
        message = (
            f"torch_autocast.dtype={dtype!r} was given: it may be bfloat16, which needs no loss"
            ' scale. Use that, or the section "fp16".'
        )
        raise OptionError(message)
    return torch.bfloat16


def _zero(values: Values) -> Zero:
    name = "zero_optimization"
    optimizer, param = f"{name}.offload_optimizer", f"{name}.offload_param"
    stage = values[f"{name}.stage"]
    states = OffloadOptimizer(**_fields(OffloadOptimizer, optimizer, values))
    weights = OffloadParam(**_fields(OffloadParam, param, values))
    if stage < _SHARDS_PARAMETERS and weights.device != "none":
        say_once(f"{param} has no effect at stage={stage}: parameters are sharded in stage 3 only")
        weights = OffloadParam()
    if stage == 0 and states.device != "none":
        say_once(f"{optimizer} has no effect at stage=0, where nothing is sharded")
        states = OffloadOptimizer()
    return Zero(
        stage=stage,
        offload_optimizer=states,
        offload_param=weights,
        enable_sanity_checks=values[f"{name}.enable_sanity_checks"],
        hpz_partition_size=values[f"{name}.zero_hpz_partition_size"],
        mics_shard_size=values[f"{name}.mics_shard_size"],
    )


def _named(values: Values, section: str) -> Named | None:
    kind, params = values[f"{section}.type"], values[f"{section}.params"]
    if kind is None:
        if params:
            message = f"{section}.params was given without {section}.type. Name the type."
            raise OptionError(message)
        return None
    return Named(kind, dict(params or {}))


def _fields(cls: type, section: str, values: Values) -> dict[str, Any]:
    return {f.name: values[f"{section}.{f.name}"] for f in fields(cls)}


def batch_of(train: int | None, micro: int | None, steps: int | None, world: int) -> Batch:
    """Return all three batch sizes for ``world`` ranks; ``steps`` defaults to 1."""
    if train is None:
        if micro is None:
            message = f"Neither {_TRAIN} nor {_MICRO} is given. Write at least one of them."
            raise OptionError(message)
        return Batch(micro * (steps or 1) * world, micro, steps or 1)
    if micro is None:
        micro = _quotient(train, _STEPS, steps or 1, world, _MICRO)
    if steps is None:
        steps = _quotient(train, _MICRO, micro, world, _STEPS)
    product = micro * steps * world
    if train != product:
        message = (
            f"{_TRAIN}={train} was given, and {_MICRO} x {_STEPS} x ranks is {micro} x {steps} x"
            f" {world} = {product}. Leave one of the three out, or make them agree."
        )
        raise OptionError(message)
    return Batch(train, micro, steps)


def _quotient(train: int, name: str, factor: int, world: int, wanted: str) -> int:
    quotient, rest = divmod(train, factor * world)
    if rest or quotient == 0:
        message = (
            f"{_TRAIN}={train} gives no whole {wanted}: {train} / ({factor} x {world}) is"
            f" {train / (factor * world):.4g}, where {factor} is {name} and {world} the ranks."
            f" Make {_TRAIN} a multiple of {factor * world}."
        )
        raise OptionError(message)
    return quotient


def refuse_two_precisions(values: Mapping[str, Any]) -> None:
    """Raise OptionError for fp16 with bf16, and for gradients reduced in another dtype."""
    if values["fp16.enabled"] and values["bf16.enabled"]:
        message = (
            "fp16.enabled and bf16.enabled are both true. Keep bf16, which needs no loss scale, or"
            " fp16 where the device has no bfloat16."
        )
        raise OptionError(message)
    computed = "fp16" if values["fp16.enabled"] else "bf16" if values["bf16.enabled"] else "fp32"
    travels = values["communication_data_type"]
    if travels not in {None, computed}:
        message = (
            f"communication_data_type={travels!r} was given, but gradients are computed in"
            f" {computed} and reduced in the same dtype. Leave it out."
        )
        raise OptionError(message)


def check_conflicts(settings: Settings, world: int) -> None:
    """Raise OptionError for settings that contradict each other."""
    zero = settings.zero
    _check_nvme(zero.offload_optimizer, "offload_optimizer")
    _check_nvme(zero.offload_param, "offload_param")
    _check_groups(zero, world)


def _check_nvme(offload: OffloadOptimizer | OffloadParam, name: str) -> None:
    if offload.device == "nvme" and offload.nvme_path is None:
        message = (
            f'zero_optimization.{name}.device="nvme" was given without nvme_path. Name a directory'
            " on a local disk."
        )
        raise OptionError(message)


def _check_groups(zero: Zero, world: int) -> None:
    size = zero.mics_shard_size
    if size <= 1:
        return
    if zero.stage < 3:
        message = (
            f"zero_optimization.mics_shard_size={size} was given with stage={zero.stage}: it groups"
            " the ranks that share parameters, which is stage 3."
        )
        raise OptionError(message)
    if world % size:
        message = (
            f"zero_optimization.mics_shard_size={size} was given for {world} ranks: groups of"
            f" {size} do not divide them. Use a divisor of {world}."
        )
        raise OptionError(message)
