"""Copies of units that stay on the device: fewer bytes over the link, and the same bits."""

import gc
import logging
import weakref
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
from compare import all_equal
from models import ResidualMatrix
from tensorstow import Budget, Plan
from tensorstow.fsdp import device_cache
from tensorstow.fsdp.h2d_prefetch import h2d_prefetcher_of
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.optim.stowed_adam import StowedAdam

WIDTH, BLOCKS = 128, 6
BLOCK_BYTES = 4 * WIDTH * WIDTH
AMPLE = "1GiB"


def stowed(plan: Plan, **given: Any) -> tuple[nn.Module, StowedAdam]:  # noqa: ANN401
    model = nn.Sequential(*(ResidualMatrix(WIDTH, i) for i in range(BLOCKS)))
    return tensorstow.stow(model, partial(tensorstow.AdamW, lr=1e-2), plan=plan, **given)


def train(
    model: nn.Module,
    optimizer: StowedAdam,
    device: torch.device,
    *,
    rows: int = 4,
    steps: int = 3,
    micro: int = 1,
) -> list[torch.Tensor]:
    """Train, with an evaluation between steps; return the weights."""
    for step in range(steps):
        for turn in range(micro):
            generator = torch.Generator().manual_seed(10 * step + turn)
            x = torch.randn(rows, WIDTH, generator=generator).to(device)
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
    optimizer.wait()
    return [value.cpu().clone() for value in model.state_dict().values()]


PLANS = [
    Plan(parameters="host"),
    Plan(parameters="host", overlap="forward", prefetch=0),
    Plan(parameters="host", overlap="backward", accumulation_steps=2),
    Plan(parameters="host", states="disk", accumulation_steps=2, prefetch=1),
    Plan(parameters="host", overlap="backward", parameter_units={"0": "disk"}),
    Plan(parameters="host", parameter_units={"1": "disk", "2": "device"}),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_same_bits_with_copies_that_stay(plan: Plan, device: torch.device) -> None:
    dtype = torch.bfloat16 if plan.prefetch == 1 or plan.overlap == "backward" else None
    found, moved = [], []
    for limit in (None, AMPLE):
        model, optimizer = stowed(plan.but(device_budget=limit), compute_dtype=dtype)
        found.append(train(model, optimizer, device, micro=plan.accumulation_steps))
        moved.append(parameter_bytes(model).link_bytes_up)
        held = parameter_bytes(model).device_cache_bytes
        optimizer.close()
    assert all_equal(*found)
    here = sum(plan.tier_of(str(i)) == "host" for i in range(BLOCKS))
    assert held == here * BLOCK_BYTES // (2 if dtype else 1)
    assert moved[1] < moved[0]


def test_a_unit_is_copied_once_for_forward_and_backward(device: torch.device) -> None:
    model, optimizer = stowed(Plan(parameters="host", device_budget=AMPLE, prefetch=0))
    x = torch.ones(4, WIDTH, device=device)
    moved = [0]
    for _ in range(5):
        model(x).square().mean().backward()
        moved.append(parameter_bytes(model).link_bytes_up)
        optimizer.step()
        optimizer.zero_grad()
    assert moved[2] >= 2 * (2 * BLOCKS - 1) * BLOCK_BYTES  # two steps are measured
    assert [b - a for a, b in pairwise(moved[2:])] == [BLOCKS * BLOCK_BYTES] * 3
    optimizer.close()


def wait_both_ways(_: nn.Module, given: tuple[torch.Tensor]) -> None:
    """Wait for the device before a block's forward, and behind its backward."""
    torch.accelerator.synchronize()
    if given[0].requires_grad:
        given[0].register_hook(lambda _: torch.accelerator.synchronize())


def test_units_that_are_gathered_once_have_no_copies(device: torch.device) -> None:
    model, optimizer = stowed(Plan(parameters="host", device_budget=AMPLE, unsharded=["1"]))
    train(model, optimizer, device)
    assert parameter_bytes(model).device_cache_bytes == (BLOCKS - 1) * BLOCK_BYTES
    optimizer.close()


def test_what_is_written_between_steps_is_what_is_computed_with(device: torch.device) -> None:
    """To what `state_dict` returns, which over one rank is host memory itself."""
    model, optimizer = stowed(Plan(parameters="host", device_budget=AMPLE))
    train(model, optimizer, device)
    x = torch.ones(4, WIDTH, device=device)
    with torch.no_grad():
        model(x)
        for value in model.state_dict().values():
            value.zero_()
        assert torch.equal(model(x), x)
    optimizer.close()


@pytest.mark.usefixtures("garbage_apart")
def test_no_more_stays_than_fits_what_a_step_leaves(
    device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cache, "_CACHES", weakref.WeakSet())
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()  # what earlier tests took is not this model's
    model, optimizer = stowed(Plan(parameters="host", device_budget="1B"))
    for block in model.children():  # or what streams hold at once would be as the host has time
        block.register_forward_pre_hook(wait_both_ways)
    train(model, optimizer, device)
    assert parameter_bytes(model).device_cache_bytes == 0
    prefetcher = h2d_prefetcher_of(model)
    assert prefetcher is not None
    cache = prefetcher.cache
    assert cache is not None
    needed = cache._other_bytes
    assert needed is not None
    limit = cache._limit_bytes = needed + 7 * BLOCK_BYTES // 2
    with caplog.at_level(logging.INFO, logger="tensorstow"):
        cache.assume(needed)
        train(model, optimizer, device)
        assert parameter_bytes(model).device_cache_bytes == 3 * BLOCK_BYTES
        assert torch.accelerator.max_memory_allocated() <= limit
        # Steps of more rows need more: what stays makes room.
        rows = 4 * BLOCK_BYTES // (4 * WIDTH)
        train(model, optimizer, device, rows=rows, steps=1)
        assert parameter_bytes(model).device_cache_bytes < 3 * BLOCK_BYTES
    said = [r.getMessage() for r in caplog.records if "stay on the device" in r.getMessage()]
    assert len(said) == 2
    assert said[0].startswith("copies of 3 of 6 units stay")
    optimizer.close()


@pytest.mark.usefixtures("device")
def test_a_plan_that_is_chosen_fills_the_device() -> None:
    """Within a budget that is too small for all parameters."""
    limit = 23 * BLOCK_BYTES // 2
    model, optimizer = stowed("auto", budget=Budget(device=limit))  # type: ignore[arg-type]
    plan = tensorstow.plan_of(model)
    assert plan.parameters == "host"
    assert plan.device_budget == limit
    optimizer.close()
