"""A plan as lines of Python, as a DeepSpeed configuration, and as Gemini's arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.plan import Plan, with_ranges
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import reaches_host
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.plans import plan_of
from tensorstow.formats.state_format import StateFormat
from tensorstow.planner.search import uses_disk

_OFFLOAD = {Tier.HOST: "cpu", Tier.DISK: "nvme"}
_GEMINI_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_USUAL = Plan()
_FIELDS = (
    "parameter_units",
    "overlap",
    "update_on",
    "accumulation_steps",
    "ordered_reduce",
    "ram_budget",
    "weight_ram_budget",
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
    directory: Path | None
    """Directory for states and parameters on disk."""
    commits: bool
    """Whether the run commits to ``directory``."""
    fills_cache: bool
    """Whether the model is from transformers: its forward fills a cache by default."""
    batch: int
    """Sequences of a micro-batch."""
    ranks: int
    """Number of ranks that the model is sharded over."""
    device_is_host: bool
    """Whether the CPU computes."""
    lora: int | None = None
    """The rank of adapters; None: there are none."""
    ema: float | None = None
    """The decay of averages of the weights; None: there are none."""

    @property
    def lr(self) -> float:
        """Return a usual learning rate for fine-tuning."""
        return 1e-5 if self.lora is None else 1e-4

    @property
    def place(self) -> str:
        """Return the directory, or one that stands for it if none was named."""
        return str(self.directory or "/nvme")


def recipes_of(recipe: Recipe) -> dict[str, Any]:
    """Return a plan in each form, and the fields that each cannot express, as its run has them."""
    configuration = _deepspeed_of(recipe)
    refused = {} if recipe.state_format is None else {"state_format": None}
    refused |= {} if recipe.ema is None else {"ema": None}
    described = plan_of(
        read_settings(configuration, recipe.ranks), device_is_host=recipe.device_is_host
    )
    lacks = _differences(described, recipe.plan, ("parameters", "states", *_FIELDS))
    pool, described_pool = recipe.plan.weight_ram_budget, described.weight_ram_budget
    rest = None if pool is None or described_pool is None else int(pool) - int(described_pool)
    if rest is not None and rest < recipe.dtype.itemsize:  # DeepSpeed counts elements
        lacks.pop("weight_ram_budget", None)
    commits = {"commits": False} if recipe.commits else {}
    names = ("overlap", "update_on", "accumulation_steps", "ordered_reduce", "activations")
    return {
        "code": _code_of(recipe),
        "deepspeed": configuration,
        "deepspeed_lacks": {**lacks, **refused, **commits},
        "gemini": _gemini_of(recipe),
        "gemini_lacks": {**_differences(_USUAL, recipe.plan, names), **refused},
    }


def _differences(plan: Plan, other: Plan, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of ``plan`` among ``names`` that differ from those of ``other``."""
    values = {name: getattr(plan, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(other, name)}


def fields_of(plan: Plan) -> dict[str, Any]:
    """Return the tiers of a plan, and the fields that differ from their defaults."""
    fields: dict[str, Any] = {"parameters": str(plan.parameters), "states": str(plan.states)}
    fields |= _differences(plan, _USUAL, _FIELDS)
    if plan.parameter_units:
        tiers = with_ranges(plan.parameter_units)
        fields["parameter_units"] = {name: str(tier) for name, tier in tiers.items()}
    return fields


def _code_of(recipe: Recipe) -> list[str]:
    """Return the lines of Python that place ``model``."""
    plan = recipe.plan
    arguments = ", ".join(f"{name}={value!r}" for name, value in fields_of(plan).items())
    keywords = [f"lr={recipe.lr}", "plan=plan"]
    if recipe.state_format is not None:
        keywords.append(f"state_format={str(recipe.state_format)!r}")
    if recipe.ema is not None:
        keywords.append(f"ema={recipe.ema}")
    if recipe.commits:
        keywords.append(f"dir={recipe.place!r}")
    elif recipe.directory is not None and uses_disk(plan):
        keywords += [f"dir={recipe.place!r}", "durability='none'"]
    uncached = recipe.fills_cache and plan.activations is ActivationPlacement.RECOMPUTE
    adapters = f'peft.LoraConfig(r={recipe.lora}, target_modules="all-linear")'
    return [
        f"import {'' if recipe.lora is None else 'peft, '}tensorstow",
        *([] if recipe.lora is None else [f"model = peft.get_peft_model(model, {adapters})"]),
        *(["model.config.use_cache = False  # else recomputing fills it again"] * uncached),
        f"plan = tensorstow.Plan({arguments})",
        f"model, optimizer = tensorstow.stow(model, tensorstow.AdamW, {', '.join(keywords)})",
    ]


def _deepspeed_of(recipe: Recipe) -> dict[str, Any]:
    """Return a DeepSpeed configuration that is as near to the plan as can be."""
    plan, batch = recipe.plan, recipe.batch
    zero: dict[str, Any] = {"stage": plan.stage}
    for name, tier in (("offload_param", plan.parameters), ("offload_optimizer", plan.states)):
        if tier in _OFFLOAD:
            zero[name] = {"device": _OFFLOAD[tier]}
            if tier == Tier.DISK:
                zero[name]["nvme_path"] = recipe.place
    if plan.parameters == Tier.DISK:
        zero["offload_param"]["max_in_cpu"] = (
            int(plan.weight_ram_budget or 0) // recipe.dtype.itemsize
        )
    if not reaches_host(plan.update_on):
        zero["offload_optimizer"]["ratio"] = 0.0
    configuration: dict[str, Any] = {
        "train_batch_size": batch * plan.accumulation_steps * recipe.ranks,
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": recipe.lr}},
        "zero_optimization": zero,
    }
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if recipe.dtype == kind:
            configuration[name] = {"enabled": True}
    return configuration


def _gemini_of(recipe: Recipe) -> list[str] | None:
    """Return lines of Python that boost ``model``; None: they cannot express the plan."""
    plan = recipe.plan
    precision = _GEMINI_PRECISIONS.get(recipe.dtype)
    if plan.parameters == Tier.DISK or plan.parameter_units or precision is None or recipe.commits:
        return None
    below = float(plan.parameters == Tier.HOST)
    arguments = f"offload_optim_frac=1.0, offload_param_frac={below}, precision={precision!r}"
    disk = ""
    if plan.states == Tier.DISK:
        disk = f", nvme_offload_fraction=1.0, nvme_offload_dir={recipe.place!r}"
        if plan.ram_budget is not None:
            disk += f", ram_budget={plan.ram_budget}"
    return [
        "from tensorstow.colossalai import HybridAdam, booster",
        f"optimizer = HybridAdam(model.parameters(), lr={recipe.lr}{disk})",
        f"plugin = booster.plugin.GeminiPlugin({arguments})",
        "model, optimizer, *_ = booster.Booster(plugin).boost(model, optimizer)",
    ]
