"""Predicted against measured peak bytes of DEVICE, of small models on the simulated accelerator.

Predicted is the most: gradients that leave the device are there as long as their copies take, and
how long that is says the run. Activations are in both. A process of its own has the accelerator.
"""

import gc
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.plans import MODELS, QUICK_MODELS
from benchmarks.measure import Figure, Settings, at_most, lines_of, not_available
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.sharding import make_mesh
from tensorstow.fsdp.stow import stow
from tensorstow.fsdp.traced_placement import TracedPlacement
from tensorstow.fsdp.units import units_of
from tensorstow.measure.activations import trace
from tensorstow.measure.models import build_model, from_config
from tensorstow.optim.adam import AdamW
from tensorstow.planner.placement import Conditions, bytes_of
from tensorstow.planner.sizes import Sizes

_PLANS = {
    "parameters on DEVICE": Plan(Tier.DEVICE, Tier.HOST),
    "parameters on DEVICE, states on DISK": Plan(Tier.DEVICE, Tier.DISK),
    "parameters on DEVICE, backward": Plan(Tier.DEVICE, Tier.HOST, overlap="backward"),
    "parameters on HOST": Plan(Tier.HOST, Tier.HOST),
    "parameters on HOST, backward": Plan(Tier.HOST, Tier.HOST, overlap="backward"),
    "all on DISK": Plan(Tier.DISK, Tier.DISK),
    "parameters on DEVICE, two micro-batches": Plan(accumulation_steps=2),
    "parameters on DEVICE, activations recomputed": Plan(activations="recompute"),
    "parameters on DEVICE, activations on HOST": Plan(activations="host"),
}
_BATCH, _SEQUENCE, _STEPS = 2, 64, 3
_ROOT = Path(__file__).parents[2]
_OFF, _CHILD_SECONDS = 0.05, 600


def figures(settings: Settings) -> Iterator[Figure]:
    """Compare every model under every plan."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("plan_bytes", None, "transformers is not installed")
        return
    for model in QUICK_MODELS if settings.quick else MODELS:
        for plan, (predicted, measured) in _in_child(model, settings.scratch(4 << 30)).items():
            detail = {"predicted": predicted, "measured": measured}
            name = f"{model}, {plan}: bytes on DEVICE / the bound"
            yield Figure(name, at_most(1 + _OFF), measured / predicted, "x", detail)


def _in_child(model: str, directory: Path) -> dict[str, tuple[int, int]]:
    words = ("benchmarks.accelerator.plan_bytes", model, str(directory))
    found: dict[str, tuple[int, int]] = json.loads(lines_of(*words, seconds=_CHILD_SECONDS)[-1])
    return found


def _compared(model: str, directory: str, device: torch.device) -> dict[str, tuple[int, int]]:
    """Return the predicted and the measured peak of each plan."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps({**MODELS, **QUICK_MODELS}[model]), encoding="utf-8")
        named = build_model(str(file))
        sizes = Sizes.of(units_of(named.module), 1)
        found = {}
        for name, plan in _PLANS.items():
            placed = TracedPlacement(plan.activations, device_is_host=False)
            held = trace(named, _BATCH, _SEQUENCE, placed).held()
            conditions = Conditions(device_is_host=False, activations=held)
            predicted = bytes_of(plan, sizes, conditions)[Tier.DEVICE]
            found[name] = (predicted, _peak(named.config, plan, folder, device))
        return found


def _peak(config: Any, plan: Plan, folder: str, device: torch.device) -> int:  # noqa: ANN401
    """Return the most bytes that a run has on the device."""
    for _ in range(2):  # FSDP2's cycles go in two
        gc.collect()
    before = torch.accelerator.memory_allocated()
    model = from_config(config, "cpu").train()
    make, given = partial(AdamW, lr=1e-4), dict[str, Any]()
    if Tier.DISK in {plan.states, plan.parameters}:
        make, given["dir"] = partial(make, durability="none"), folder
    if plan.parameters == Tier.DEVICE:
        model.to(device)
    else:
        given["mesh"] = make_mesh(device, stage=plan.stage, replicas=plan.replicas)
    model, optimizer = stow(model, make, plan=plan, **given)
    ids = torch.randint(500, (_BATCH, _SEQUENCE)).to(device)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    with optimizer:
        for _ in range(_STEPS):
            for _ in range(plan.accumulation_steps):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


if __name__ == "__main__":
    sys.path.insert(0, str(_ROOT / "tests"))
    simulated = importlib.import_module("simulated")  # which registers the device
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(_compared(*sys.argv[1:3], torch.device(simulated.DEVICE, 0))))
