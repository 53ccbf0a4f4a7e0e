"""A plan as lines of Python, as a DeepSpeed configuration, and as Gemini's arguments."""

from dataclasses import dataclass
from typing import Any

import torch

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import reaches_host
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.plans import plan_of
from tensorstow.formats.state_format import StateFormat
from tensorstow.planner.search import uses_disk

_OFFLOAD = {Tier.HOST: "cpu", Tier.DISK: "nvme"}
_LR = 1e-4
_GEMINI_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ANY_DIRECTORY = "/nvme"
"""Placeholder for the directory if none was named."""
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
"""Fields of a plan, next to its tiers, that a search may set."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A plan, and what else a run needs to follow it."""

    plan: Plan
    state_format: StateFormat | None
    dtype: torch.dtype
    """Dtype of the parameters."""
    directory: str | None
    """Directory for states and parameters on disk."""
    commits: bool
    """Whether the run commits to ``directory``."""
    fills_cache: bool = False
    """Whether the model is from transformers: its forward fills a cache by default."""


def fields_of(plan: Plan) -> dict[str, Any]:
    """Return the tiers of a plan, and the fields that differ from their defaults.

    Args:
        plan: The plan.
    """
    fields: dict[str, Any] = {"parameters": str(plan.parameters), "states": str(plan.states)}
    for name in _FIELDS:
        if getattr(plan, name) != getattr(_USUAL, name):
            fields[name] = getattr(plan, name)
    if plan.units:
        fields["units"] = {name: str(tier) for name, tier in plan.units.items()}
    return fields


def code_of(recipe: Recipe) -> list[str]:
    """Return the lines of Python that place ``model``.

    Args:
        recipe: The plan.
    """
    plan, directory = recipe.plan, recipe.directory
    arguments = ", ".join(f"{name}={value!r}" for name, value in fields_of(plan).items())
    keywords, directory_keyword = f"lr={_LR}", ""
    if recipe.state_format is not None:
        keywords = f"{keywords}, state_format={str(recipe.state_format)!r}"
    if recipe.commits:
        directory_keyword = f", dir={directory or ANY_DIRECTORY!r}"
    elif directory is not None and uses_disk(plan):
        keywords, directory_keyword = f"{keywords}, durability='none'", f", dir={directory!r}"
    factory = f"functools.partial(tensorstow.AdamW, {keywords})"
    uncached = recipe.fills_cache and plan.activations is ActivationPlacement.RECOMPUTE
    return [
        "import functools, tensorstow",
        *(["model.config.use_cache = False"] if uncached else []),
        f"plan = tensorstow.Plan({arguments})",
        f"model, optimizer = tensorstow.stow(model, {factory}, plan=plan{directory_keyword})",
    ]


def deepspeed_of(recipe: Recipe, batch: int, ranks: int) -> dict[str, Any]:
    """Return a DeepSpeed configuration; ``deepspeed_lacks`` returns what it cannot express.

    Args:
        recipe: The plan.
        batch: Sequences of a micro-batch.
        ranks: Number of ranks that the model is sharded over.
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
    if not reaches_host(plan.update_on):
        zero["offload_optimizer"]["ratio"] = 0.0
    configuration: dict[str, Any] = {
        "train_batch_size": batch * plan.accumulation_steps * ranks,
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": _LR}},
        "zero_optimization": zero,
    }
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if recipe.dtype == kind:
            configuration[name] = {"enabled": True}
    return configuration


def deepspeed_lacks(
    recipe: Recipe, configuration: dict[str, Any], ranks: int, *, device_is_host: bool
) -> dict[str, Any]:
    """Return the fields of a plan that a configuration cannot express, with its own values.

    Args:
        recipe: The plan.
        configuration: What ``deepspeed_of`` returned.
        ranks: Number of ranks that the model is sharded over.
        device_is_host: Whether the CPU computes.
    """
    described = plan_of(read_settings(configuration, ranks), device_is_host=device_is_host)
    plan, itemsize = recipe.plan, recipe.dtype.itemsize
    lacks = {
        name: getattr(described, name)
        for name in ("parameters", "states", *_FIELDS)
        if getattr(described, name) != getattr(plan, name)
    }
    pool_bytes, described_pool_bytes = plan.buffer_pool_bytes, described.buffer_pool_bytes
    if (
        pool_bytes is not None
        and described_pool_bytes is not None
        and int(pool_bytes) - int(described_pool_bytes) < itemsize
    ):
        lacks.pop("buffer_pool_bytes", None)  # it counts elements
    if recipe.state_format is not None:
        lacks["state_format"] = None
    if recipe.commits:
        lacks["commits"] = False
    return lacks


def gemini_of(recipe: Recipe) -> list[str] | None:
    """Return lines of Python that boost ``model``; None: they cannot express the plan.

    ``gemini_lacks`` returns what they leave out.

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
    """Return the fields of a plan that ``gemini_of`` cannot express, with its run's values.

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
