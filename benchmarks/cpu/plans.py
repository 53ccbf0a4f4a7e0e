"""Predicted against measured: bytes of each tier and seconds of a step, of small models on the CPU.

Bytes that tensors and buffers have are compared tier by tier; beside them stands the process's
resident memory, which also has what the allocator keeps: each plan has a process of its own. Of
models that the planner does not trace (``models.OTHERS``) bytes alone are compared, and one process
has all plans. Plans that a search chooses for three budgets are run too.
"""

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.cpu.models import OTHERS, Loss
from benchmarks.measure import Figure, Settings, at_least, at_most, lines_of, not_available
from tensorstow import usage
from tensorstow.base.budget import Budget
from tensorstow.base.errors import BudgetError
from tensorstow.base.plan import Plan
from tensorstow.base.profile import Profile
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.placed_activations import PlacedActivations
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.stow import stow
from tensorstow.fsdp.traced_placement import TracedPlacement
from tensorstow.fsdp.units import units_of
from tensorstow.measure.activations import trace
from tensorstow.measure.calibration import calibrate
from tensorstow.measure.models import build_model, from_config
from tensorstow.optim.adam import AdamW
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.planner.placement import Conditions, bytes_of, items_of
from tensorstow.planner.search import PlanRequest, search
from tensorstow.planner.seconds import MachineRates, time_of
from tensorstow.planner.sizes import Sizes
from tensorstow.report.rss import peak_bytes, resident_bytes

_BATCH, _SEQUENCE = 4, 128
_WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2, 6 layers": {
        "model_type": "gpt2",
        "n_layer": 6,
        "n_embd": 512,
        "n_head": 8,
        "vocab_size": 16000,
    },
    "llama, 8 layers, bf16": {
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "vocab_size": 16000,
        **_WIDE,
    },
    "qwen2, tied": {
        "model_type": "qwen2",
        "dtype": "float32",
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "vocab_size": 16000,
        "tie_word_embeddings": True,
        **_WIDE,
    },
    "opt, 8 layers": {
        "model_type": "opt",
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "ffn_dim": 2048,
        "num_attention_heads": 8,
        "word_embed_proj_dim": 512,
        "vocab_size": 16000,
    },
}
QUICK_MODELS: dict[str, dict[str, Any]] = {
    "gpt2, tiny": {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 2, "vocab_size": 512}
}
_PLANS = {
    "RAM": Plan(),
    "states on DISK": Plan(states=Tier.DISK, overlap="none"),
    "states on DISK, forward": Plan(states=Tier.DISK, overlap="forward"),
    "states on DISK, backward": Plan(states=Tier.DISK, overlap="backward"),
    "all on DISK": Plan(Tier.DISK, Tier.DISK),
    "all on DISK, backward": Plan(Tier.DISK, Tier.DISK, overlap="backward"),
}
_ACTIVATIONS = {
    "activations recomputed": Plan(activations="recompute"),
    "activations on DISK": Plan(activations="disk", activation_ram_budget="32MiB"),
    "all on DISK, activations too": Plan(
        Tier.DISK, Tier.DISK, activations="disk", activation_ram_budget="32MiB"
    ),
}
"""Of models that are traced: what blocks save is not there between forward and backward."""
_BYTES_OFF, _SECONDS_OFF, _SPEED = 0.05, 0.2, 0.95
_CHILD_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Case:
    """A model under a plan, and where its files and rates are."""

    model: str
    plans: dict[str, str]
    """As JSON, by name."""
    directory: str
    profile: str
    steps: int


def figures(settings: Settings) -> Iterator[Figure]:
    """Compare every model under every plan."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("plans", None, "transformers is not installed")
        return
    directory = settings.scratch(8 << 30)
    profile = calibrate([directory])
    text = json.dumps(profile.as_dict())
    for model in QUICK_MODELS if settings.quick else [*MODELS, *OTHERS]:
        steps = 2 if settings.quick else max(settings.pairs // 3, 3)
        plans = {name: plan.to_json() for name, plan in _PLANS.items()}
        case = Case(model, plans, str(directory), text, steps)
        if model in OTHERS:
            for plan, found in _in_child(case).items():
                yield from _compared(f"{model}, {plan}", found)
            continue
        seconds, choices = {}, {}
        for plan, found in _each_alone(case, plans):
            yield from _compared(f"{model}, {plan}", found)
            seconds[plan], choices = found["seconds"][1], found["choices"]
        for plan, found in _each_alone(case, {n: p.to_json() for n, p in _ACTIVATIONS.items()}):
            yield from _compared(f"{model}, {plan}", found)
        more = {plan: plan for plan, _ in choices.values() if plan not in seconds}
        for plan, found in _each_alone(case, more):
            yield from _compared(f"{model}, {_told(plan)}", found)
            seconds[plan] = found["seconds"][1]
        for budget, (chosen, fitting) in choices.items():
            yield _speed(f"{model}, {budget}", chosen, {name: seconds[name] for name in fitting})


def _each_alone(case: Case, plans: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each plan, and what its own process found."""
    for name, plan in plans.items():
        yield name, _in_child(replace(case, plans={name: plan}))[name]


def _told(plan: str) -> str:
    """Return what a plan that a search chose is called; others have a name."""
    if plan in _PLANS:
        return plan
    found = Plan.from_json(plan)
    where = f"parameters on {found.parameters}, {len(found.parameter_units)} units elsewhere"
    return f"chosen: {where}, states on {found.states}, {found.overlap}"


def _speed(name: str, chosen: str, seconds: Mapping[str, float]) -> Figure:
    """Return the speed of the plan that a search chooses, as a part of the fastest's.

    The fastest is of those that fit and refuse nothing, as the search has it.
    """
    free = {plan: took for plan, took in seconds.items() if not plan.endswith("backward")}
    fastest = min((free or seconds).values())
    detail = {
        "chosen": _told(chosen),
        "seconds": {_told(plan): took for plan, took in seconds.items()},
    }
    found = fastest / seconds[chosen]
    return Figure(f"{name}: chosen plan against the fastest", at_least(_SPEED), found, "x", detail)


def _compared(name: str, found: dict[str, Any]) -> Iterator[Figure]:
    for tier, (predicted, measured) in found["bytes"].items():
        what = f"{name}: bytes on {tier.upper()}"
        if found["is_bound"] and tier == Tier.HOST:
            # How many gradients wait for their update says the run: predicted is the most.
            detail = {"predicted": predicted, "measured": measured}
            yield Figure(f"{what} / the bound", at_most(1), measured / predicted, "x", detail)
        elif measured or predicted:
            yield _off(what, _BYTES_OFF, predicted, measured)
    if found["resident"] is not None:
        yield _off(f"{name}: peak resident memory", None, *found["resident"])
        yield _off(f"{name}: seconds of a step", _SECONDS_OFF, *found["seconds"])


def _off(name: str, limit: float | None, predicted: float, measured: float) -> Figure:
    """Return how far a prediction is from what was measured, as a part of that."""
    off = abs(predicted - measured) / measured if measured else float(predicted > 0)
    detail = {"predicted": predicted, "measured": measured}
    asked = None if limit is None else at_most(limit)
    return Figure(f"{name}: predicted off measured by", asked, off, "of it", detail)


def _in_child(case: Case) -> dict[str, Any]:
    text = json.dumps(asdict(case))
    printed = lines_of("benchmarks.cpu.plans", seconds=_CHILD_SECONDS, text=text)
    found: dict[str, Any] = json.loads(printed[-1])
    return found


def _run(case: Case) -> dict[str, Any]:
    """Predict a case, train it, and return what was predicted and measured, by plan."""
    run = _run_other if case.model in OTHERS else _run_traced
    return {name: run(case, Plan.from_json(text)) for name, text in case.plans.items()}


def _run_other(case: Case, plan: Plan) -> dict[str, Any]:
    model, loss = OTHERS[case.model]()
    predicted = _predicted(plan, Sizes.of(units_of(model), 1), _HERE)
    measured, _ = _train(case, plan, model.train(), loss)
    found = {"bytes": _pairs(predicted, measured), "resident": None, "seconds": None}
    return found | {"is_bound": plan.overlap == "backward"}


def _run_traced(case: Case, plan: Plan) -> dict[str, Any]:
    file = Path(case.directory) / f".tensorstow-bench-{time.monotonic_ns()}.json"
    file.write_text(json.dumps({**MODELS, **QUICK_MODELS}[case.model]), encoding="utf-8")
    try:
        named = build_model(str(file))
    finally:
        file.unlink()
    placed = TracedPlacement(plan.activations, device_is_host=True)
    traced = trace(named, _BATCH, _SEQUENCE, placed)
    conditions = replace(_HERE, activations=traced.held())
    sizes = Sizes.of(units_of(named.module), 1)
    profile = Profile.from_json(case.profile)
    machine = MachineRates(profile, "cpu", profile.rates_of(Path(case.directory)))
    batch = traced.micro_batch(_BATCH * _SEQUENCE)
    step = time_of(plan, sizes, conditions, batch, machine)
    predicted = _predicted(plan, sizes, conditions)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that of now
    before = resident_bytes()
    model = from_config(named.config, "cpu").train()
    ids = torch.randint(500, (_BATCH, _SEQUENCE), generator=torch.Generator())

    def loss(model: nn.Module) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return found

    measured, seconds = _train(case, plan, model, loss)
    host = bytes_of(plan, sizes, conditions)[Tier.HOST]
    request = PlanRequest(sizes, Budget(), _HERE, batch=batch, machine=machine)
    return {
        "bytes": _pairs(predicted, measured),
        "is_bound": plan.overlap == "backward",
        "resident": (host, (peak_bytes() or 0) - before),
        "seconds": (step.seconds, statistics.median(seconds)),
        "choices": _choices(request),
    }


def _choices(request: PlanRequest) -> dict[str, tuple[str, list[str]]]:
    """Return the plan that is chosen for each of three budgets, and those that fit it.

    One that is none of ``_PLANS`` is told by its JSON. A budget that nothing fits is left out.
    """
    host = {
        name: bytes_of(plan, request.sizes, request.conditions)[Tier.HOST]
        for name, plan in _PLANS.items()
    }
    found = {}
    for budget, most in (
        ("no limit", None),
        ("less than RAM", host["RAM"] - 1),
        ("less than with states on DISK", host["states on DISK"] - 1),
    ):
        within = replace(request, budget=Budget(host=most), spend=False)
        try:
            plan = search(within).chosen.plan
        except BudgetError:
            continue
        known = (name for name, p in _PLANS.items() if _is_like(p, plan))
        chosen = next(known, plan.to_json())
        fitting = [name for name, needed in host.items() if most is None or needed <= most]
        found[budget] = (chosen, sorted({*fitting, chosen}))
    return found


def _is_like(known: Plan, plan: Plan) -> bool:
    """Return whether two plans differ in the room for parameters from disk alone, if in that."""
    return plan.but(weight_ram_budget=known.weight_ram_budget) == known


_HERE = Conditions(device_is_host=True)


def _predicted(plan: Plan, sizes: Sizes, conditions: Conditions) -> dict[Tier, int]:
    """Return the bytes of each tier that the planner predicts, activations left out.

    These are in the resident memory of the process alone; those that were moved elsewhere count.
    """
    predicted = dict.fromkeys(Tier, 0)
    for item in items_of(plan, sizes, conditions):
        predicted[item.tier] += item.nbytes * (item.purpose != "activations")
    return predicted


def _train(
    case: Case, plan: Plan, model: nn.Module, loss: Loss
) -> tuple[dict[Tier, int], list[float]]:
    """Train some steps; return the bytes that each tier held, and seconds of each step."""
    make = partial(AdamW, lr=1e-4, dir=case.directory, durability="none")
    if plan.states != Tier.DISK:
        make = partial(AdamW, lr=1e-4)
    model, optimizer = stow(model, make, plan=plan)
    seconds, gradients, turns = [], 0, 2 + case.steps
    for turn in range(turns):
        start = time.perf_counter()
        loss(model).backward()
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        if turn >= 2:
            seconds.append(time.perf_counter() - start)
    optimizer.synchronize()
    held, weights = usage(optimizer=optimizer).states, parameter_bytes(model)
    saved = _saved_bytes(optimizer)
    optimizer.close()
    if plan.overlap == "backward":
        gradients = held.gradient_bytes
    own = weights.most_buffer_pool_bytes + weights.host_bytes
    own = own or sum(p.nbytes for p in model.parameters())
    measured = {
        Tier.DEVICE: 0,
        Tier.HOST: held.ram_bytes + held.ring_bytes + gradients + own + saved[0],
        Tier.DISK: held.file_bytes + weights.disk_bytes + saved[1] // turns,
    }
    return measured, seconds


def _saved_bytes(optimizer: StowedAdam) -> tuple[int, int]:
    """Return the most that saved activations had of host memory, and what they wrote to disk."""
    parts = (make() for make in optimizer._recorded_parts)  # noqa: SLF001  # a hook of the engine
    counts = [each for p in parts if isinstance(p, PlacedActivations) for each in p.nbytes()]
    return sum(c.most_host_bytes for c in counts), sum(c.bytes_written for c in counts)


def _pairs(
    predicted: Mapping[Tier, int], measured: Mapping[Tier, int]
) -> dict[str, tuple[int, int]]:
    return {str(tier): (predicted[tier], measured[tier]) for tier in Tier}


if __name__ == "__main__":
    print(json.dumps(_run(Case(**json.loads(sys.stdin.read())))))
