"""Translates a DeepSpeed configuration to a plan, a dtype and a directory."""

import json
import logging
from collections.abc import Mapping
from typing import Any, get_args

import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.fields import read_value
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import Bytes
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import Overlap, UpdateOn, refuse_delayed, timing_of
from tensorstow.deepspeed.config.settings import Device, Settings
from tensorstow.formats.state_format import StateFormat
from tensorstow.states.policy import PipelinePolicy

logger = logging.getLogger("tensorstow")

PARAMETER_TIERS: Mapping[Device, Tier] = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}
_STATES: Mapping[Device, Tier] = {"none": Tier.HOST, "cpu": Tier.HOST, "nvme": Tier.DISK}


def plan_of(settings: Settings, *, device_is_host: bool, overlap: Overlap | None = None) -> Plan:
    """Return the plan that ``settings`` mean.

    ``stage`` is the plan's. ``offload_param`` "none", "cpu", "nvme" are DEVICE, HOST, DISK.
    ``offload_optimizer`` "none" and "cpu" are both HOST, "nvme" is DISK, at every stage: where
    states are on the device upstream, they are in host memory here, with the same results.
    ``ratio`` of them is updated by the CPU, the rest by the accelerator. ``mics_shard_size`` ranks
    hold a full copy. ``max_in_cpu`` elements of parameters on disk may be in memory; 0: the
    minimum.

    [Note: When updates run] During backward, where parameters are on disk or the accelerator
    updates a share of them, unless something needs all gradients before an update: clipping, loss
    scaling or a skipped step. Else during the next forward, which is exact under all of these; but
    in ``step()`` where the accelerator has a share, for which no forward waits. All have the same
    results, and neither of the first two takes longer than the last: no rate of the machine is
    needed to choose.

    ``device_is_host``: whether the CPU computes. ``overlap``: what the user says of it; None: the
    rule. Raises OptionError for a ``ratio`` below 1 without an accelerator, or parameters
    are not on it, and for an ``overlap`` that cannot be had.
    """
    zero = settings.zero
    parameters = PARAMETER_TIERS[zero.offload_param.device]
    update_on = _update_on(settings, parameters, device_is_host=device_is_host)
    plan = Plan(
        parameters=parameters,
        states=_STATES[zero.offload_optimizer.device],
        stage=zero.stage,
        replicas=_replicas(settings),
        update_on=update_on,
        accumulation_steps=settings.batch.accumulation,
        weight_ram_budget=weight_ram_budget(settings),
    )
    chosen, why = _overlap(settings, plan, overlap)
    logger.info(
        'the DeepSpeed configuration means parameters=%s, states=%s, stage=%s, overlap="%s" (%s)',
        *(plan.parameters, plan.states, plan.stage, chosen, why),
    )
    return plan.but(overlap=chosen)


def _overlap(settings: Settings, plan: Plan, asked: Overlap | None) -> tuple[Overlap, str]:
    """Return when updates run, and why ([Note: When updates run])."""
    needs = {
        "gradient_clipping": settings.gradient_clipping > 0.0,
        "fp16": settings.fp16 is not None,
        "bf16.check_grad_overflow": settings.bf16 and settings.check_grad_overflow,
        "managed_gradient_accumulation=false": not settings.managed_accumulation,
    }
    dependent = ", ".join(name for name, is_set in needs.items() if is_set)
    if asked is not None:
        refuse_delayed(asked, "to initialize()", "Leave it out.")
        read_value(Overlap, asked, "overlap")
        _refuse_overlap(plan, asked, dependent)
        return asked, "as passed to initialize()"
    if plan.update_on is None and (plan.parameters != Tier.DISK or dependent):
        return "forward", "exact with clipping, scaling and skipped steps"
    cause = "ratio is below 1" if plan.update_on is not None else "parameters are on disk"
    if dependent:
        return "none", f"{cause}, and {dependent} needs all gradients before an update"
    return "backward", f"{cause}, and nothing needs all gradients before an update"


def _refuse_overlap(plan: Plan, asked: Overlap, dependent: str) -> None:
    """Raise OptionError, which names what can be used, if ``asked`` cannot be had."""
    usable = [
        overlap
        for overlap in get_args(Overlap)
        if not (dependent and timing_of(overlap).begins_early) and _fits(plan, overlap)
    ]
    if asked in usable:
        return
    if timing_of(asked).can_undo:
        plan.but(overlap=asked)  # raises what it lacks
        message = (
            f'overlap="{asked}" was given with {dependent}: the engine does not undo updates of'
            " backward. Use tensorstow.stow with optimizer.clip_grad_norm_()."
        )
        raise OptionError(message)
    use = f"Use overlap={' or '.join(map(json.dumps, usable))}"
    if not _fits(plan, asked):
        also = f" and {dependent}" if dependent else ""
        message = (
            f"overlap={json.dumps(asked)} was given with a ratio below 1{also}: updates on the"
            f" device are not waited for module by module. {use}."
        )
        raise OptionError(message)
    message = (
        f'overlap="{asked}" was given with {dependent}: gradients are used during backward, before'
        f" all of a step are final. {use}, or leave {dependent.replace(', ', ' and ')} out."
    )
    raise OptionError(message)


def _fits(plan: Plan, overlap: Overlap) -> bool:
    try:
        plan.but(overlap=overlap)
    except OptionError:
        return False
    return True


def _update_on(settings: Settings, parameters: Tier, *, device_is_host: bool) -> UpdateOn | None:
    """Return the share that an accelerator updates (``Plan.update_on``); None: nothing."""
    offload = settings.zero.offload_optimizer
    if offload.ratio == 1.0:
        return None
    if offload.device == "none" or device_is_host:
        why = (
            "there is no accelerator, and the CPU updates everything"
            if device_is_host
            else 'device is "none": it is a share of what is offloaded'
        )
        message = (
            f"zero_optimization.offload_optimizer.ratio={offload.ratio} was given, and {why}. Leave"
            " it out: results do not depend on it."
        )
        raise OptionError(message)
    if parameters != Tier.DEVICE:
        message = (
            f"zero_optimization.offload_optimizer.ratio={offload.ratio} was given with"
            f" offload_param.device={settings.zero.offload_param.device!r}: the accelerator"
            " updates parameters that are on it. Leave one of both out."
        )
        raise OptionError(message)
    return 1.0 - offload.ratio if offload.ratio else "device"


def world_of(settings: Settings) -> int:
    """Return the number of ranks that the batch sizes are for."""
    batch = settings.batch
    return batch.train // (batch.micro * batch.accumulation)


def dtype_of(settings: Settings) -> torch.dtype:
    """Return what the model's parameters are cast to.

    Under ``bf16`` and ``fp16`` DeepSpeed trains a 16-bit model and keeps fp32 master weights with
    the optimizer's states. Here too the model is in that dtype, and the master weights are with the
    states (for bf16 only the 16 bits that the weight lacks). Casting fp32 parameters in forward
    instead would take twice the bytes on the device, and for every gather and gradient. Master
    weights start as the given weights before the cast; DeepSpeed's start as the weights after it.
    """
    if settings.bf16:
        return torch.bfloat16
    return torch.float32 if settings.fp16 is None else torch.float16


def directory_of(settings: Settings) -> str | None:
    """Return the directory of parameters on disk; None: there are none, or a disk is chosen."""
    param = settings.zero.offload_param
    return param.nvme_path if param.device == "nvme" else None


def placement_keywords(settings: Settings, placed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that place the optimizer's states, from those that ``stow`` passes.

    States on disk are in scratch files in their own ``nvme_path``, as DeepSpeed's are;
    ``save_checkpoint`` is what outlives the run. For bf16 weights only the lower halves of the
    master weights are stored.
    """
    keywords = dict(placed)
    keywords.pop("dir", None)
    keywords.pop("durability", None)  # states in memory are in no directory
    keywords.pop("accumulation_steps", None)  # the engine says which backward is the last one
    kept_as = state_format_of(dtype_of(settings))
    if kept_as is not None:
        keywords["state_format"] = str(kept_as)
    if placed.get("states") == "disk":
        keywords["policy"] = PipelinePolicy(depth=settings.aio.queue_depth)
        path = settings.zero.offload_optimizer.nvme_path
        if path is not None:
            keywords |= {"dir": path, "durability": "none"}
    return keywords


def state_format_of(dtype: torch.dtype) -> StateFormat | None:
    """Return how states of parameters of ``dtype`` are kept, on any tier; None: in fp32."""
    return StateFormat.SPLIT if dtype == torch.bfloat16 else None


def weight_ram_budget(settings: Settings) -> Bytes | None:
    """Return what ``max_in_cpu`` means in bytes; None: the minimum, or nothing is on disk."""
    param = settings.zero.offload_param
    if param.device != "nvme" or not param.max_in_cpu:
        return None
    return Bytes(param.max_in_cpu * dtype_of(settings).itemsize)


def _replicas(settings: Settings) -> int:
    size = settings.zero.mics_shard_size
    if size <= 0 or settings.zero.stage < 3:
        return 1
    return world_of(settings) // size
