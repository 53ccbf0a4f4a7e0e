"""Peak resident memory against the bound that a plan prints, for models and plans that are drawn.

Each pair of a small transformers architecture and a plan trains three steps in a process of its
own, on the CPU. The bound is the last line of the plan's table: all that the tier holds, and the
headroom for the process and its allocators. The peak is the kernel's (``ru_maxrss``).

``tensorstow.set_memory_limit`` has the bound as its limit meanwhile. Pairs that need more raise
before they pass it, and are counted.
"""

import argparse
import importlib.util
import json
import random
import resource
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import (
    Figure,
    Limit,
    Settings,
    at_least,
    at_most,
    not_available,
    run_alone,
)
from tensorstow.base.errors import BudgetError
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.stow import stow
from tensorstow.fsdp.traced_placement import TracedPlacement
from tensorstow.fsdp.units import units_of
from tensorstow.io.allocator import set_memory_limit
from tensorstow.measure.activations import trace
from tensorstow.measure.models import build_model, from_config
from tensorstow.optim.adam import AdamW
from tensorstow.planner.headroom import usual_headroom
from tensorstow.planner.placement import Conditions, bytes_of
from tensorstow.planner.sizes import Sizes

_SEED, _PAIRS_FOR_EACH, _STEPS = 27, 5, 3
_NEAR, _SHARE_NEAR = 0.85, 0.9


def figures(settings: Settings) -> Iterator[Figure]:
    """Draw pairs, train each, and compare all peaks with their bounds."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("plan_memory", None, "transformers is not installed")
        return
    directory = settings.scratch(8 << 30)
    file = directory / "tensorstow-bench-pair.json"
    draw = random.Random(_SEED)  # noqa: S311  # the same pairs each time
    pairs = []
    try:
        for _ in range(2 if settings.quick else _PAIRS_FOR_EACH * settings.pairs):
            pair = _drawn(draw, quick=settings.quick)
            run = partial(run_alone, "benchmarks.cpu.plan_memory", str(file), quick=False)
            file.write_text(json.dumps(pair), encoding="utf-8")
            pair |= run("bound")
            file.write_text(json.dumps(pair), encoding="utf-8")
            pairs.append({**pair, **run("train")})
    finally:
        file.unlink(missing_ok=True)
    ratios = [pair["peak"] / pair["bound"] for pair in pairs]
    limits: dict[str, Limit | None] = {
        "raised": at_most(0),
        "within": at_least(1.0),
        "near": at_least(_SHARE_NEAR),
        "most": at_most(1.0),
    }
    if settings.quick:
        limits = dict.fromkeys(limits)
    detail = {"median": statistics.median(ratios), "pairs": pairs}
    count = f"of {len(pairs)} drawn pairs"
    within = sum(ratio <= 1.0 for ratio in ratios) / len(pairs)
    near = sum(ratio >= _NEAR for ratio in ratios) / len(pairs)
    raised = sum(pair["raised"] is not None for pair in pairs)
    yield Figure(f"{count}, those within the bound", limits["within"], within, "of all", detail)
    yield Figure(
        f"{count}, those that the bound as a limit ended", limits["raised"], raised, "", {}
    )
    yield Figure(f"{count}, those that use 0.85 of it", limits["near"], near, "of all", {})
    yield Figure(f"{count}, the highest peak / its bound", limits["most"], max(ratios), "x", {})


def _drawn(draw: random.Random, *, quick: bool) -> dict[str, Any]:
    """Return a model's configuration, a batch, and a plan."""
    heads = 2 if quick else draw.choice((8, 12))
    width = 64 * heads
    layers, words = (2, 512) if quick else (draw.randint(4, 10), draw.choice((8000, 16000, 32000)))
    tied = draw.random() < 0.5
    kind = draw.choice(("gpt2", "llama", "qwen2"))
    if kind == "gpt2":
        config = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": words}
    else:
        config = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": 8 * width // 3,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "vocab_size": words,
            "tie_word_embeddings": tied,
        }
    dtype = draw.choice(("float32", "float32", "bfloat16"))
    parameters = draw.choice((Tier.HOST, Tier.DISK))
    states = Tier.DISK if parameters == Tier.DISK else draw.choice((Tier.HOST, Tier.DISK))
    overlaps = ("none", "forward", "backward") if states == Tier.DISK else ("none",)
    activations = draw.choice(("keep", "keep", "recompute", "disk"))
    plan = Plan(
        parameters=parameters,
        states=states,
        overlap=draw.choice(overlaps),
        activations=activations,
        activation_ram_budget="64MiB" if activations == "disk" else None,
    )
    return {
        "config": {"model_type": kind, "dtype": dtype, **config},
        "batch": 2 if quick else draw.choice((2, 4, 8)),
        "tokens": 16 if quick else draw.choice((128, 256)),
        "plan": plan.to_json(),
    }


# --- the children ---


def _bound(pair: dict[str, Any], config: Path) -> dict[str, Any]:
    """Return the bytes of host memory that the plan's table ends with."""
    plan = Plan.from_json(pair["plan"])
    named = build_model(str(config))
    placed = TracedPlacement(plan.activations, device_is_host=True)
    traced = trace(named, pair["batch"], pair["tokens"], placed)
    conditions = Conditions(device_is_host=True, activations=traced.held())
    held = bytes_of(plan, Sizes.of(units_of(named.module), 1), conditions)[Tier.HOST]
    return {"bound": held + usual_headroom(device_is_host=True)[Tier.HOST].beside(held)}


def _train(pair: dict[str, Any], config: Path) -> dict[str, Any]:
    """Train some steps; return the most bytes that were resident, and what ended it if any did."""
    set_memory_limit(pair["bound"])
    try:
        _train_steps(pair, config)
    except (BudgetError, RuntimeError) as error:
        if not isinstance(error, BudgetError) and "can't allocate memory" not in str(error):
            raise
        raised = str(error).splitlines()[0]
    else:
        raised = None
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, "raised": raised}


def _train_steps(pair: dict[str, Any], config: Path) -> None:
    plan = Plan.from_json(pair["plan"])
    named = build_model(str(config))
    model = from_config(named.config, "cpu").train()
    scratch = {"dir": config.parent, "durability": "none"} if plan.states == Tier.DISK else {}
    model, optimizer = stow(model, partial(AdamW, lr=1e-4, **scratch), plan=plan)
    ids = torch.randint(500, (pair["batch"], pair["tokens"]))
    for _ in range(_STEPS):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def _run(pair_file: Path, act: str) -> dict[str, Any]:
    pair = json.loads(pair_file.read_text(encoding="utf-8"))
    config = pair_file.with_name("tensorstow-bench-config.json")
    config.write_text(json.dumps(pair["config"]), encoding="utf-8")
    try:
        return (_bound if act == "bound" else _train)(pair, config)
    finally:
        config.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("pair", type=Path)
    parser.add_argument("act", choices=("bound", "train"))
    options = parser.parse_args()
    print(json.dumps(_run(options.pair, options.act)))
