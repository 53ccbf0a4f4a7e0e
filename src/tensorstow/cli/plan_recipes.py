"""What runs a plan: lines of Python, a DeepSpeed configuration, Gemini's arguments."""

from typing import Any

import torch

from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier

_OFFLOAD = {Tier.HOST: "cpu", Tier.DISK: "nvme"}
_LR = 1e-4
_GEMINI_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ANY_DIRECTORY = "/nvme"
"""Stands for the directory where none was named."""


def fields_of(plan: Plan) -> dict[str, Any]:
    """Return where everything lives, and what else differs from a plan's defaults.

    Args:
        plan: The plan.
    """
    found: dict[str, Any] = {"parameters": str(plan.parameters), "states": str(plan.states)}
    for name, usual in (
        ("overlap", "none"),
        ("accumulation_steps", 1),
        ("ram_budget", None),
        ("buffer_pool_bytes", None),
    ):
        if getattr(plan, name) != usual:
            found[name] = getattr(plan, name)
    return found


def code_of(plan: Plan, directory: str | None, *, commits: bool) -> list[str]:
    """Return three lines of Python that place ``model``.

    Args:
        plan: The plan.
        directory: Where states and parameters on disk are to be.
        commits: Whether the run commits, there.
    """
    given = ", ".join(f"{name}={value!r}" for name, value in fields_of(plan).items())
    keywords, where = f"lr={_LR}", ""
    if commits:
        where = f", dir={directory or ANY_DIRECTORY!r}"
    elif directory is not None and Tier.DISK in {plan.parameters, plan.states}:
        keywords, where = f"{keywords}, durability='none'", f", dir={directory!r}"
    made = f"functools.partial(tensorstow.AdamW, {keywords})"
    return [
        "import functools, tensorstow",
        f"plan = tensorstow.Plan({given})",
        f"model, optimizer = tensorstow.stow(model, {made}, plan=plan{where})",
    ]


def deepspeed_of(
    plan: Plan, dtype: torch.dtype, batch: int, directory: str | None
) -> dict[str, Any]:
    """Return a configuration of DeepSpeed.

    Args:
        plan: The plan.
        dtype: Of the parameters.
        batch: Sequences of a micro-batch.
        directory: Where states and parameters on disk are to be.
    """
    zero: dict[str, Any] = {"stage": plan.stage}
    for name, tier in (("offload_param", plan.parameters), ("offload_optimizer", plan.states)):
        if tier in _OFFLOAD:
            zero[name] = {"device": _OFFLOAD[tier]}
            if tier == Tier.DISK:
                zero[name]["nvme_path"] = directory or ANY_DIRECTORY
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "optimizer": {"type": "AdamW", "params": {"lr": _LR}},
        "zero_optimization": zero,
    }
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if dtype == kind:
            found[name] = {"enabled": True}
    return found


def gemini_of(
    plan: Plan, dtype: torch.dtype, directory: str | None, *, commits: bool
) -> list[str] | None:
    """Return lines of Python that boost ``model``; None: Gemini's arguments cannot say the plan.

    Args:
        plan: The plan.
        dtype: Of the parameters.
        directory: Where states on disk are to be.
        commits: Whether the run commits.
    """
    precision = _GEMINI_PRECISIONS.get(dtype)
    if plan.parameters == Tier.DISK or precision is None or commits:
        return None
    below = float(plan.parameters == Tier.HOST)
    arguments = f"offload_optim_frac=1.0, offload_param_frac={below}, precision={precision!r}"
    disk = ""
    if plan.states == Tier.DISK:
        disk = f", nvme_offload_fraction=1.0, nvme_offload_dir={directory or ANY_DIRECTORY!r}"
        if plan.ram_budget is not None:
            disk += f", ram_budget={plan.ram_budget}"
    return [
        "from tensorstow.colossalai import HybridAdam, booster",
        f"optimizer = HybridAdam(model.parameters(), lr={_LR}{disk})",
        f"plugin = booster.plugin.GeminiPlugin({arguments})",
        "model, optimizer, *_ = booster.Booster(plugin).boost(model, optimizer)",
    ]
