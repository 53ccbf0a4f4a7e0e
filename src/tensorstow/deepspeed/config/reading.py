"""``read_settings``: checks a configuration as a whole, and returns ``Settings``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tensorstow.base.errors import OptionError
from tensorstow.base.fields import PositiveInt, read_value
from tensorstow.deepspeed.config.json_text import Source, load
from tensorstow.deepspeed.config.key import section_of
from tensorstow.deepspeed.config.settings import (
    Batch,
    Fp16,
    Named,
    OffloadOptimizer,
    OffloadParam,
    Settings,
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
    read_value(PositiveInt, world, "world")
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
    settings: Settings = section_of(
        Settings,
        values,
        batch=batch_of(values[_TRAIN], values[_MICRO], values[_STEPS], world),
        optimizer=_named(values, "optimizer"),
        scheduler=_named(values, "scheduler"),
        fp16=section_of(Fp16, values, "fp16.") if values["fp16.enabled"] else None,
    )
    settings = replace(settings, zero=_used(settings.zero))
    zero = settings.zero
    _check_precisions(settings)
    _check_nvme(zero.offload_optimizer, "offload_optimizer")
    _check_nvme(zero.offload_param, "offload_param")
    _check_groups(zero, world)
    return settings


def _used(zero: Zero) -> Zero:
    """Return the section without what its stage does not use, which is logged."""
    stage, name = zero.stage, "zero_optimization"
    if stage < _SHARDS_PARAMETERS and zero.offload_param.device != "none":
        say_once(
            f"{name}.offload_param has no effect at stage={stage}: parameters are sharded in stage"
            " 3 only"
        )
        zero = replace(zero, offload_param=OffloadParam())
    if stage == 0 and zero.offload_optimizer.device != "none":
        say_once(f"{name}.offload_optimizer has no effect at stage=0, where nothing is sharded")
        zero = replace(zero, offload_optimizer=OffloadOptimizer())
    return zero


def _named(values: Values, section: str) -> Named | None:
    kind, params = values[f"{section}.type"], values[f"{section}.params"]
    if kind is None:
        if params:
            message = f"{section}.params was given without {section}.type. Name the type."
            raise OptionError(message)
        return None
    return Named(kind, dict(params or {}))


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


def _check_precisions(settings: Settings) -> None:
    if settings.fp16 is not None and settings.bf16:
        message = (
            "fp16.enabled and bf16.enabled are both true. Keep bf16, which needs no loss scale, or"
            " fp16 where the device has no bfloat16."
        )
        raise OptionError(message)
    computed = "fp16" if settings.fp16 is not None else "bf16" if settings.bf16 else "fp32"
    travels = settings.communication_data_type
    if travels not in {None, computed}:
        message = (
            f"communication_data_type={travels!r} was given, but gradients are computed in"
            f" {computed} and reduced in the same dtype. Leave it out."
        )
        raise OptionError(message)
    if not settings.torch_autocast.enabled:
        return
    if computed != "fp32":
        message = (
            "torch_autocast.enabled is true with bf16 or fp16: parameters are fp32 under"
            " torch_autocast. Keep one of both."
        )
        raise OptionError(message)
    dtype = settings.torch_autocast.dtype
    if dtype not in {None, "bf16", "bfloat16", "torch.bfloat16"}:
        message = (
            f"torch_autocast.dtype={dtype!r} was given: it may be bfloat16, which needs no loss"
            ' scale. Use that, or the section "fp16".'
        )
        raise OptionError(message)


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
