"""Threads, open files, mappings and memory are given back with models and optimizers."""

import gc
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
from process_counts import open_descriptors
from tensorstow import AdamW, Plan, StowedOptimizer
from tensorstow.colossalai import HybridAdam
from tensorstow.states.state_store import _KEPT
from tensorstow.tensornvme import DiskOffloader

pytestmark = pytest.mark.usefixtures("garbage_apart")  # it makes the collector quick, too

ROUNDS = int(os.environ.get("TENSORSTOW_ROUNDS", "8"))
"""How many of each kind are made; ``make soak`` sets 200."""
PAGE = os.sysconf("SC_PAGE_SIZE")
SLACK = 24 << 20
"""Bytes that malloc may keep."""
Pair = tuple[Any, Any]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.backward(model(torch.ones(2, 32)).square().mean())
    optimizer.step()


def adam(directory: Path, **given: Any) -> Pair:  # noqa: ANN401  # passed on
    model = layers()
    if given.get("states") == "disk":
        given["dir"] = directory
    optimizer = AdamW(model.parameters(), module=model, **given)
    step(model, optimizer)
    return model, optimizer


def failed(directory: Path) -> Pair:
    model, optimizer = adam(directory, states="disk", durability="none")
    engine = optimizer._states().engine
    engine.inject_fault("write", times=-1, error=5)

    def train() -> None:
        step(model, optimizer)
        optimizer.synchronize()

    with pytest.raises(OSError, match="Input/output"):
        train()
    return model, optimizer


def piecewise(directory: Path) -> Pair:
    model = layers()
    optimizer = StowedOptimizer(torch.optim.AdamW, model.parameters(), states="disk", dir=directory)
    step(model, optimizer)
    return model, optimizer


def stowed(directory: Path, parameters: str, states: str) -> Pair:
    del directory  # scratch files, where there is room
    plan = Plan(parameters=parameters, states=states)
    model, optimizer = tensorstow.stow(layers(), partial(AdamW, lr=1e-3), plan=plan)
    step(model, optimizer)
    return model, optimizer


def hybrid(directory: Path) -> Pair:
    model = layers()
    optimizer = HybridAdam(
        model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=str(directory)
    )
    step(model, optimizer)
    return model, optimizer


def offloader(directory: Path) -> Pair:
    made = DiskOffloader(str(directory))
    tensor = torch.ones(1 << 12)
    made.async_write(tensor)
    return made, tensor


OVERLAPS = ("none", "forward", "backward")
KINDS: dict[str, Callable[[Path], Pair]] = {
    **{f"ram {o}": partial(adam, states="ram", overlap=o) for o in OVERLAPS},
    **{
        f"scratch {o}": partial(adam, states="disk", durability="none", overlap=o) for o in OVERLAPS
    },
    **{f"durable {o}": partial(adam, states="disk", overlap=o) for o in OVERLAPS},
    "failed": failed,
    "piecewise": piecewise,
    "stowed in host memory": partial(stowed, parameters="host", states="host"),
    "stowed on disk": partial(stowed, parameters="disk", states="disk"),
    "hybrid": hybrid,
    "offloader": offloader,
}


def held() -> dict[str, int]:
    """Return what this process has of the system, and what the stores of optimizers have."""
    gc.collect()
    gc.collect()  # FSDP2's modules are in cycles, and hold what is in others past the collector
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": open_descriptors(),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "stores": len(_KEPT),
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_given_back_in_any_order(kind: str, tmp_path: Path) -> None:
    numbers = itertools.count()

    def turn(order: int) -> None:
        directory = tmp_path / str(next(numbers))
        directory.mkdir()
        model, optimizer = KINDS[kind](directory)
        if order == 0:
            del model, optimizer
        elif order == 1:
            del optimizer
            gc.collect()
            del model
        elif order == 2:
            del model
            gc.collect()
            del optimizer
        else:
            model.cycle = [optimizer, model]  # both go when the collector finds them
            del model, optimizer
        gc.collect()

    for order in range(4):  # what is made once for good
        turn(order)
    before = held()
    for index in range(ROUNDS):
        turn(index % 4)
    after = held()
    assert after["threads"] <= before["threads"]
    assert after["files"] <= before["files"]
    assert after["stores"] <= before["stores"]
    assert after["maps"] <= before["maps"] + 8  # malloc's own come and go
    assert after["bytes"] <= before["bytes"] + SLACK
