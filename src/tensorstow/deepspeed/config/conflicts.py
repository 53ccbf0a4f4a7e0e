"""Values of a configuration that are each good and do not go together."""

from collections.abc import Mapping
from typing import Any

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import OffloadOptimizer, OffloadParam, Settings, Zero


def refuse_two_precisions(values: Mapping[str, Any]) -> None:
    """Raise OptionError where fp16 and bf16 are both on, or gradients would travel in a third."""
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
            f"communication_data_type={travels!r} was given, and gradients are computed in"
            f" {computed} and reduced in that. Leave it out."
        )
        raise OptionError(message)


def check(settings: Settings, world: int) -> None:
    """Raise OptionError for settings that contradict each other."""
    zero = settings.zero
    if zero.stage < 3 and zero.offload_param.device != "none":
        message = (
            f'zero_optimization.offload_param.device="{zero.offload_param.device}" was given with'
            f" stage={zero.stage}: parameters are split and fetched in stage 3 only. Set stage to"
            " 3, or leave offload_param out."
        )
        raise OptionError(message)
    if zero.stage == 0 and zero.offload_optimizer.device != "none":
        message = (
            "zero_optimization.offload_optimizer.device="
            f'"{zero.offload_optimizer.device}" was given with stage=0, where nothing is sharded.'
            " Set stage to 1, 2 or 3, or leave offload_optimizer out."
        )
        raise OptionError(message)
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
            f" {size} do not divide them. Give a divisor of {world}."
        )
        raise OptionError(message)
