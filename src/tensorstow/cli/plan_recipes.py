"""What runs a plan: lines of Python, a DeepSpeed configuration, Gemini's arguments."""

from dataclasses import dataclass
from typing import Any

import torch

from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.plans import plan_of
from tensorstow.formats.state_format import StateFormat
from tensorstow.planner.search import uses_disk

_OFFLOAD = {Tier.HOST: "cpu", Tier.DISK: "nvme"}
_LR = 1e-4
_GEMINI_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ANY_DIRECTORY = "/nvme"
"""Stands for the directory where none was named."""
_USUAL = Plan()
_FIELDS = (
    "units",
    "overlap",
    "update_on",
    "accumulation_steps",
    "ram_budget",
    "buffer_pool_bytes",
    "activations",
    "activation_ram_budget",
)
"""Of a plan, beside tiers: what a search may set."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A plan, and what else is to be said for a run to follow it."""

    plan: Plan
    state_format: StateFormat | None
    dtype: torch.dtype
    """Of the parameters."""
    directory: str | None
    """Where states and parameters on disk are to be."""
    commits: bool
    """Whether the run commits, there."""
    fills_cache: bool = False
    """Whether the model is one of transformers, whose forward fills a cache unless told not to."""


def fields_of(plan: Plan) -> dict[str, Any]:
    """Return where everything lives, and what else differs from a plan's defaults.

    Args:
        plan: The plan.
    """
    found: dict[str, Any] = {"parameters": str(plan.parameters), "states": str(plan.states)}
    for name in _FIELDS:
        if getattr(plan, name) != getattr(_USUAL, name):
            found[name] = getattr(plan, name)
    if plan.units:
        found["units"] = {name: str(tier) for name, tier in plan.units.items()}
    return found


def code_of(recipe: Recipe) -> list[str]:
    """Return the lines of Python that place ``model``.

    Args:
        recipe: The plan.
    """
    plan, directory = recipe.plan, recipe.directory
    given = ", ".join(f"{name}={value!r}" for name, value in fields_of(plan).items())
    keywords, where = f"lr={_LR}", ""
    if recipe.state_format is not None:
        keywords = f"{keywords}, state_format={str(recipe.state_format)!r}"
    if recipe.commits:
        where = f", dir={directory or ANY_DIRECTORY!r}"
    elif directory is not None and uses_disk(plan):
        keywords, where = f"{keywords}, durability='none'", f", dir={directory!r}"
    made = f"functools.partial(tensorstow.AdamW, {keywords})"
    uncached = recipe.fills_cache and plan.activations == "recompute"
    return [
        "import functools, tensorstow",
        *(["model.config.use_cache = False"] if uncached else []),
        f"plan = tensorstow.Plan({given})",
        f"model, optimizer = tensorstow.stow(model, {made}, plan=plan{where})",
    ]


def deepspeed_of(recipe: Recipe, batch: int, ranks: int) -> dict[str, Any]:
    """Return a configuration of DeepSpeed; ``deepspeed_lacks`` says what it does not say.

    Args:
        recipe: The plan.
        batch: Sequences of a micro-batch.
        ranks: Over how many ranks the model is sharded.
    """
    plan, directory = recipe.plan, recipe.directory
    zero: dict[str, Any] = {"stage": plan.stage}
    for name, tier in (("offload_param", plan.parameters), ("offload_optimizer", plan.states)):
        if tier in _OFFLOAD:
            zero[name] = {"device": _OFFLOAD[tier]}
            if tier == Tier.DISK:
                zero[name]["nvme_path"] = directory or ANY_DIRECTORY
    if plan.parameters == Tier.DISK:
        zero["offload_param"]["max_in_cpu"] = (
            int(plan.buffer_pool_bytes or 0) // recipe.dtype.itemsize
        )
    if plan.update_on == "device":
        zero["offload_optimizer"]["ratio"] = 0.0
    found: dict[str, Any] = {
        "train_batch_size": batch * plan.accumulation_steps * ranks,
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": _LR}},
        "zero_optimization": zero,
    }
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if recipe.dtype == kind:
            found[name] = {"enabled": True}
    return found


def deepspeed_lacks(
    recipe: Recipe, configuration: dict[str, Any], ranks: int, *, here: bool
) -> dict[str, Any]:
    """Return what a configuration cannot say of the plan: names, and what it has instead.

    Args:
        recipe: The plan.
        configuration: What ``deepspeed_of`` returned.
        ranks: Over how many ranks the model is sharded.
        here: Whether the CPU computes.
    """
    read = plan_of(read_settings(configuration, ranks), device_is_host=here)
    plan, itemsize = recipe.plan, recipe.dtype.itemsize
    lacks = {
        name: getattr(read, name)
        for name in ("parameters", "states", *_FIELDS)
        if getattr(read, name) != getattr(plan, name)
    }
    given, meant = plan.buffer_pool_bytes, read.buffer_pool_bytes
    if given is not None and meant is not None and int(given) - int(meant) < itemsize:
        lacks.pop("buffer_pool_bytes", None)  # it counts elements
    if recipe.state_format is not None:
        lacks["state_format"] = None
    if recipe.commits:
        lacks["commits"] = False
    return lacks


def gemini_of(recipe: Recipe) -> list[str] | None:
    """Return lines of Python that boost ``model``; None: Gemini's arguments cannot say the plan.

    ``gemini_lacks`` says what they leave out.

    Args:
        recipe: The plan.
    """
    plan, directory = recipe.plan, recipe.directory
    precision = _GEMINI_PRECISIONS.get(recipe.dtype)
    if plan.parameters == Tier.DISK or plan.units or precision is None or recipe.commits:
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


def gemini_lacks(recipe: Recipe) -> dict[str, Any]:
    """Return what ``gemini_of`` cannot say of the plan: names, and what its run has instead.

    Args:
        recipe: The plan.
    """
    plan = recipe.plan
    names = ("overlap", "update_on", "accumulation_steps", "activations")
    lacks = {
        name: getattr(_USUAL, name)
        for name in names
        if getattr(plan, name) != getattr(_USUAL, name)
    }
    if recipe.state_format is not None:
        lacks["state_format"] = None
    return lacks
