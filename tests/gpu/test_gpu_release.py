"""What a stowed model gives back of an accelerator's memory, as torch's allocator counts it."""

import gc

import pytest
import torch

import tensorstow
from models import ResidualStack
from tensorstow import Plan, named_weights
from tensorstow.base.errors import OptionError

pytestmark = pytest.mark.usefixtures("garbage_apart")
WIDTH, BLOCKS = 256, 4
BLOCK_BYTES = 4 * WIDTH * (WIDTH + 1)
PLANS = [
    Plan(parameters="host"),
    Plan(parameters="host", device_budget="1GiB", overlap="forward"),
    Plan(parameters="host", states="disk", overlap="backward"),
    Plan(parameters="host", stage=2),
    Plan(parameters="disk", states="disk", overlap="forward"),
]


def allocated(device: torch.device) -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(device)


def trained(device: torch.device, plan: Plan, *, releases: bool) -> list[torch.Tensor]:
    """Train for some steps, with memory given back between them; return the weights."""
    torch.manual_seed(0)
    before = allocated(device)
    model, optimizer = tensorstow.stow(
        ResidualStack(WIDTH, BLOCKS), tensorstow.AdamW, plan=plan, lr=1e-2
    )
    x = torch.randn(4, WIDTH).to(device)
    for _ in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if releases:
            held = allocated(device) - before
            optimizer.release()
            left = allocated(device) - before
            assert held - left >= BLOCK_BYTES, (held, left)
            assert left <= 2 * x.nbytes, left
            weights = dict(named_weights(model))
            assert allocated(device) - before <= left
            assert len(weights) == len(list(model.parameters()))
            with pytest.raises(OptionError, match="A forward was called between"):
                model(x)
            optimizer.wake()
    weights = dict(named_weights(model))
    optimizer.close()
    return list(weights.values())


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_device_memory_is_given_back_between_steps(device: torch.device, plan: Plan) -> None:
    expected = trained(device, plan, releases=False)
    assert all(map(torch.equal, trained(device, plan, releases=True), expected))


@pytest.mark.parametrize("update_on", ["device", "hybrid"])
def test_slots_of_states_are_given_back(device: torch.device, update_on: str) -> None:
    results = []
    for releases in (False, True):
        torch.manual_seed(0)
        model = ResidualStack(WIDTH, BLOCKS).to(device)
        optimizer = tensorstow.AdamW(model.parameters(), lr=1e-2, update_on=update_on)
        x = torch.randn(4, WIDTH).to(device)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if releases:
                held = allocated(device)
                slots = tensorstow.usage(optimizer=optimizer).device_bytes
                optimizer.release()
                assert held - allocated(device) >= slots > 0
                assert tensorstow.usage(optimizer=optimizer).device_bytes == 0
                optimizer.wake()
                assert tensorstow.usage(optimizer=optimizer).device_bytes == slots
        results.append([p.detach().cpu() for p in model.parameters()])
        optimizer.close()
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("units", [{}, {"blocks.1": "device"}], ids=["all", "one"])
def test_weights_that_live_on_the_device_are_named(
    device: torch.device, units: dict[str, str]
) -> None:
    plan = Plan(parameters="host" if units else "device", parameter_units=units)
    model, optimizer = tensorstow.stow(
        ResidualStack(WIDTH, BLOCKS), tensorstow.AdamW, plan=plan, lr=1e-2
    )
    x = torch.randn(4, WIDTH).to(device)
    with pytest.raises(OptionError, match="of weights live on the device"):
        optimizer.release()
    model(x).sum().backward()  # nothing was released
    optimizer.close()


def test_host_memory_for_an_accelerator_is_not_given_back(device: torch.device) -> None:
    plan = Plan(parameters="disk", states="disk")
    model, optimizer = tensorstow.stow(
        ResidualStack(WIDTH, BLOCKS), tensorstow.AdamW, plan=plan, lr=1e-2
    )
    with pytest.raises(OptionError, match="for a model on an accelerator"):
        optimizer.release(host=True)
    model(torch.randn(4, WIDTH).to(device)).sum().backward()
    optimizer.close()
