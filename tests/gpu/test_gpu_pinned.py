"""Parameters on HOST and DISK: pinned to the byte, copied behind the host, ahead of their need."""

import gc
import logging
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
from compare import all_equal
from models import ResidualMatrix
from tensorstow import Plan
from tensorstow.fsdp.h2d_prefetch import h2d_prefetcher_of
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.units import units_of
from tensorstow.io import pinned
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.planner.placement import Conditions, items_of
from tensorstow.planner.sizes import Sizes

WIDTH, BLOCKS = 256, 6
BLOCK_BYTES = 4 * WIDTH * WIDTH
HOST = Plan(parameters="host")
PLANS = {
    "host": HOST,
    "forward": Plan(parameters="host", overlap="forward"),
    "backward": Plan(parameters="host", overlap="backward"),
    "disk": Plan(parameters="disk", states="disk"),
    "mixed": Plan(parameters="host", parameter_units={"1": "disk", "2": "device", "4": "disk"}),
    "alone": Plan(parameters="host", prefetch=0),
    "far": Plan(parameters="host", prefetch=9),
}


@pytest.fixture
def simulated(device: torch.device) -> Iterator[ModuleType]:
    """Return the package; its clocks and limits are as they were when a test ends."""
    if device.type != "simulated":
        pytest.skip("asks the simulated accelerator")
    import simulated  # noqa: PLC0415  # registers the device

    torch.accelerator.synchronize()
    yield simulated
    simulated.set_delays(1e-3, 5e9, 0)
    simulated.set_pinned_limit(1 << 62)


@pytest.fixture(autouse=True)
def _nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_warned", set())


class Busy(ResidualMatrix):
    """A block that the device takes ``seconds`` to compute, and as long again in backward."""

    def __init__(self, seed: int, seconds: float = 0) -> None:
        super().__init__(WIDTH, seed)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seconds:
            import simulated  # noqa: PLC0415

            simulated.busy(self.seconds)
            x.register_hook(lambda _: simulated.busy(self.seconds)) if x.requires_grad else None
        return super().forward(x)


def made(seconds: float = 0) -> nn.Sequential:
    return nn.Sequential(*(Busy(i, seconds) for i in range(BLOCKS)))


def stowed(plan: Plan, *, seconds: float = 0, **given: Any) -> tuple[nn.Module, StowedAdam]:  # noqa: ANN401
    adam = partial(tensorstow.AdamW, lr=1e-2)
    return tensorstow.stow(made(seconds), adam, plan=plan, **given)


def inputs(device: torch.device, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=generator).to(device)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.cpu().clone() for value in model.state_dict().values()]


def trained(
    model: nn.Module, optimizer: StowedAdam, device: torch.device, steps: int = 4
) -> list[torch.Tensor]:
    batches = [inputs(device, step) for step in range(steps)]
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    return weights(model)


@pytest.fixture(scope="module")
def want() -> list[torch.Tensor]:
    """Return the weights of the same training where everything is on the device."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    model, optimizer = stowed(Plan(parameters="device"))
    return trained(model, optimizer, found)


@pytest.mark.parametrize("plan", PLANS)
def test_bits_and_bytes(plan: str, device: torch.device, want: list[torch.Tensor]) -> None:
    model, optimizer = stowed(PLANS[plan])
    assert all_equal(trained(model, optimizer, device), want)
    held = parameter_bytes(model)
    of_units = [PLANS[plan].tier_of(str(i)) for i in range(BLOCKS)]
    away = sum(tier != "device" for tier in of_units)
    buffers = min(max(PLANS[plan].prefetch + 1, 2), away)
    assert held.device_bytes == buffers * BLOCK_BYTES
    assert held.staging_bytes == buffers * BLOCK_BYTES * ("disk" in of_units)
    gradients = 0 if plan == "backward" else BLOCKS * BLOCK_BYTES
    here = of_units.count("host") * BLOCK_BYTES
    assert held.pinned_bytes == here + held.staging_bytes + gradients
    optimizer.close()


@pytest.mark.parametrize(
    ("given", "dtype"),
    [({"accumulation_steps": 2}, torch.float32), ({"micro_batches": 2}, torch.bfloat16)],
    ids=["passes", "vertical"],
)
def test_pinned_memory_of_several_micro_batches_is_as_planned(
    device: torch.device, given: dict[str, int], dtype: torch.dtype
) -> None:
    plan = Plan(parameters="host", **given)  # type: ignore[arg-type]
    sizes = Sizes.of(units_of(made().to(dtype)), 1)
    items = items_of(plan, sizes, Conditions(device_is_host=False))
    counted = {item.purpose: item.nbytes for item in items if item.tier == "host"}
    adam = partial(tensorstow.AdamW, lr=1e-2)
    model, optimizer = tensorstow.stow(made().to(dtype), adam, plan=plan)
    for step in range(plan.accumulation_steps):
        model(inputs(device, step).to(dtype)).float().square().mean().backward()
    optimizer.step()
    pinned = ("parameters", "gradients", "buffers for gradients")
    assert parameter_bytes(model).pinned_bytes == sum(counted.get(what, 0) for what in pinned)
    optimizer.close()


@pytest.mark.usefixtures("garbage_apart")
def test_what_is_pinned_is_registered_to_the_byte(simulated: ModuleType) -> None:
    gc.collect()
    before = simulated.registered_bytes()
    model, optimizer = stowed(HOST)
    assert simulated.registered_bytes() - before == 2 * BLOCKS * BLOCK_BYTES
    assert parameter_bytes(model).pinned_bytes == 2 * BLOCKS * BLOCK_BYTES
    assert optimizer._memory().pinned_bytes == 0  # states are the CPU's alone
    optimizer.close()


def test_the_host_waits_for_nothing_in_forward_and_backward(
    simulated: ModuleType, device: torch.device
) -> None:
    model, optimizer = stowed(HOST)
    trained(model, optimizer, device, 2)
    x = inputs(device, 3)
    simulated.set_delays(5e-3, 5e9, 0)
    torch.accelerator.synchronize()
    simulated.take_counts()
    loss = model(x).square().mean()
    assert simulated.take_counts()["host_waits"] == 0
    loss.backward()
    assert simulated.take_counts()["host_waits"] == 0
    optimizer.step()
    optimizer.close()


@pytest.mark.usefixtures("garbage_apart")
def test_memory_that_copies_read_outlives_them(simulated: ModuleType, device: torch.device) -> None:
    model, optimizer = stowed(HOST)
    held = simulated.registered_bytes()
    x, expected = inputs(device, 0), made().to(device)(inputs(device, 0))
    torch.accelerator.synchronize()
    simulated.set_delays(0.02, 5e9, 0)
    y = model(x).detach()
    assert h2d_prefetcher_of(model) is not None
    optimizer.close()
    del model, optimizer
    gc.collect()
    gc.collect()  # what modules of FSDP2 in cycles held goes in the second pass
    assert simulated.registered_bytes() <= held - 2 * BLOCKS * BLOCK_BYTES
    assert torch.equal(y, expected)


@pytest.mark.parametrize("by", ["driver", "limit"])
@pytest.mark.parametrize("plan", ["host", "disk"])
def test_memory_that_cannot_be_pinned_is_pageable(
    plan: str,
    by: str,
    simulated: ModuleType,
    device: torch.device,
    want: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    gc.collect()
    if by == "driver":
        simulated.set_pinned_limit(0)
    else:
        monkeypatch.setenv(pinned.LIMIT, "1KiB")
    with caplog.at_level(logging.WARNING, logger="tensorstow"):
        model, optimizer = stowed(PLANS[plan])
        assert all_equal(trained(model, optimizer, device), want)
    (said,) = [r.getMessage() for r in caplog.records if "pinned" in r.getMessage()]
    assert said.startswith("256.0 KiB of host memory" if plan == "host" else "1.5 MiB of host")
    assert ("driver's error is 2" if by == "driver" else "LIMIT is 1KiB") in said
    assert parameter_bytes(model).pinned_bytes == 0
    optimizer.close()


@pytest.mark.usefixtures("garbage_apart")
def test_a_limit_leaves_some_units_pageable(
    simulated: ModuleType, device: torch.device, want: list[torch.Tensor]
) -> None:
    """They pass through pinned memory, where there is room for that."""
    gc.collect()
    simulated.set_pinned_limit(simulated.registered_bytes() + 2 * BLOCK_BYTES)
    model, optimizer = stowed(HOST)
    simulated.set_pinned_limit(1 << 62)
    assert all_equal(trained(model, optimizer, device), want)
    held = parameter_bytes(model)
    assert held.staging_bytes == 3 * BLOCK_BYTES
    assert held.pinned_bytes == 5 * BLOCK_BYTES
    optimizer.close()


@pytest.mark.parametrize("plan", ["host", "disk", "forward"])
def test_what_is_written_under_way_is_what_is_computed_with(
    plan: str, device: torch.device
) -> None:
    model, optimizer = stowed(PLANS[plan])
    trained(model, optimizer, device, 3)  # the trace is known: what comes next is uploaded
    plain = made().to(device)
    x = inputs(device, 9)
    for seed in range(2):
        for weight in plain.parameters():
            nn.init.constant_(weight, 0.5 + seed)
        model.load_state_dict({k: v.cpu() for k, v in plain.state_dict().items()})
        with torch.no_grad():
            assert torch.equal(model(x).cpu(), plain(x).cpu())
    optimizer.close()


def test_two_micro_batches_and_evaluation(device: torch.device) -> None:
    found = []
    for plan in (Plan(parameters="device", accumulation_steps=2), HOST.but(accumulation_steps=2)):
        model, optimizer = stowed(plan)
        for step in range(3):
            for micro in range(2):
                model(inputs(device, 2 * step + micro)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(inputs(device, 77))
        found.append(weights(model))
        optimizer.close()
    assert all_equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_weights_that_are_cast_pass_through_pinned_memory(
    dtype: torch.dtype, device: torch.device
) -> None:
    model, optimizer = stowed(HOST, compute_dtype=dtype)
    other, reference = stowed(Plan(parameters="device"), compute_dtype=dtype)
    assert all_equal(trained(model, optimizer, device), trained(other, reference, device))
    held = parameter_bytes(model)
    assert held.staging_bytes == held.device_bytes == 3 * BLOCK_BYTES // 2
    optimizer.close()
    reference.close()


@pytest.mark.parametrize("plan", ["host", "disk"])
def test_compute_does_not_wait_where_the_link_suffices(
    plan: str, simulated: ModuleType, device: torch.device
) -> None:
    """Unhidden, 11 copies of 12 ms each would be 0.13 s more."""
    compute, copy = 0.02, 0.012  # a copy takes up to twice that
    model, optimizer = stowed(PLANS[plan].but(overlap="none"), seconds=compute)
    trained(model, optimizer, device, 2)
    x = inputs(device, 5).requires_grad_()
    stream = torch.accelerator.current_stream()
    took = []
    for _ in range(16):  # a machine that is busy elsewhere is no schedule that waits
        torch.accelerator.synchronize()
        simulated.set_delays(copy, 1e12, 0)
        began = stream.record_event(torch.Event(device, enable_timing=True))
        model(x).square().mean().backward()
        ended = stream.record_event(torch.Event(device, enable_timing=True))
        torch.accelerator.synchronize()
        simulated.set_delays(0, 1e12, 0)
        optimizer.step()
        optimizer.zero_grad()
        took.append(began.elapsed_time(ended) / 1e3)
        if took[-1] < 2 * BLOCKS * compute + 3 * copy:
            break
    assert took[-1] < 2 * BLOCKS * compute + 3 * copy, took
    optimizer.close()


@pytest.mark.usefixtures("garbage_apart")
@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_device_holds_so_many_units_and_no_more(prefetch: int, device: torch.device) -> None:
    model, optimizer = stowed(HOST.but(prefetch=prefetch))
    trained(model, optimizer, device, 2)
    x = inputs(device, 5)
    gc.collect()
    torch.accelerator.synchronize()
    held = parameter_bytes(model).device_bytes
    assert held == max(prefetch + 1, 2) * BLOCK_BYTES
    prefetcher = h2d_prefetcher_of(model)
    assert prefetcher is not None
    before = torch.accelerator.memory_allocated()
    assert before >= held
    torch.accelerator.reset_peak_memory_stats()
    with torch.no_grad():
        model(x)
    # Gathered are the unit that is computed with and, on some ways, the next; and activations.
    assert torch.accelerator.max_memory_allocated() - before <= 2 * BLOCK_BYTES + (1 << 16)
    optimizer.close()
