"""``overlap="speculative"`` beside an accelerator, which computes long after backward returns."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from test_gpu_stow import OnDevice
from torch import nn
from training import Net, make, same_states, same_weights, spin

import tensorstow
from compare import all_equal
from ranks.stowed import finish, groups_of, loss_of, model_of
from tensorstow import Plan
from tensorstow.optim.stowed_adam import StowedAdam

NEVER, ALWAYS = 1e9, 1e-3
SCHEDULES = {
    "never": [NEVER] * 5,
    "always": [ALWAYS] * 5,
    "in turns": [NEVER, ALWAYS, NEVER, ALWAYS, NEVER],
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PLANS = [
    Plan(parameters="device", states="disk"),
    Plan(parameters="host", states="disk"),
    Plan(parameters="host", states="disk", parameter_units={"blocks.1": "device"}),
    Plan(parameters="host", states="disk", ram_budget="300KiB"),
    Plan(parameters="disk", states="disk"),
    Plan(parameters="host", states="disk", parameter_units={"blocks.1": "disk"}),
]


def train(net: nn.Module, optimizer: StowedAdam, norms: Sequence[float]) -> list[float]:
    found = []
    for step, most in enumerate(norms):
        optimizer.zero_grad()
        torch.autograd.backward(net(step))
        found.append(optimizer.clip_grad_norm_(most).item())
        optimizer.step()
    optimizer.wait()
    return found


@pytest.mark.parametrize("norms", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("states", ["disk", 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_a_step_without_overlap(
    dtype: str, states: str | float, norms: Sequence[float], device: torch.device
) -> None:
    want, got = Net(DTYPES[dtype]).to(device), Net(DTYPES[dtype]).to(device)
    plain = make(want, states=states)
    optimizer = make(got, states=states, overlap="speculative")
    assert train(got, optimizer, norms) == train(want, plain, norms)
    assert same_weights(got, want)
    assert same_states(optimizer, plain)
    optimizer.close()


@pytest.mark.parametrize("norms", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_placed_model_has_the_bits_of_one_without_overlap(
    device: torch.device, plan: Plan, norms: Sequence[float]
) -> None:
    def trained(plan: Plan) -> tuple[list[torch.Tensor], list[float]]:
        model, optimizer = tensorstow.stow(model_of(torch.bfloat16), partial(groups_of), plan=plan)
        found = []
        for step, most in enumerate(norms):
            loss_of(OnDevice(model, device), 0, step, 0).backward()
            found.append(optimizer.clip_grad_norm_(most).item())
            optimizer.step()
            optimizer.zero_grad()
        return [w.cpu() for w in finish(model, optimizer)], found

    (got, norms_got), (want, norms_want) = trained(plan.but(overlap="speculative")), trained(plan)
    assert norms_got == norms_want
    assert all_equal(got, want)


@pytest.mark.parametrize("parameters", ["device", "host"])
def test_updates_run_while_the_device_computes(
    parameters: str, device: torch.device, tmp_path: Path
) -> None:
    """The call that waits for the norm passes gradients on as the device computes them."""
    plan = Plan(parameters=parameters, states="disk", overlap="speculative")
    model, optimizer = tensorstow.stow(
        model_of(torch.bfloat16), partial(groups_of), plan=plan, dir=tmp_path, durability="none"
    )
    assert isinstance(optimizer, StowedAdam)

    def updated() -> int:
        counters = optimizer._states().pipeline.handle.live().counters()
        return int(counters["chunks_updated"])

    for step in range(2):
        before = updated()
        loss_of(OnDevice(model, device), 0, step, 0).backward()
        spin(device, 0.02)
        optimizer.clip_grad_norm_(NEVER)
        for chunk in optimizer._states().chunks:
            optimizer._states().pipeline.wait_chunk(chunk.number)
        assert updated() == before + len(optimizer._states().chunks)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_on_the_device_are_those_of_before(dtype: str, device: torch.device) -> None:
    """After ``zero_grad()`` in place of ``step()``, as where a loss is not finite."""
    want, got = Net(DTYPES[dtype]).to(device), Net(DTYPES[dtype]).to(device)
    plain, optimizer = make(want), make(got, overlap="speculative")
    found = []
    for step in range(3):
        torch.autograd.backward(got(step + 50))
        optimizer.clip_grad_norm_(NEVER)
        optimizer.zero_grad()
        found.append(same_weights(got, want))
        for net, each in ((got, optimizer), (want, plain)):
            torch.autograd.backward(net(step))
            each.step()
            each.zero_grad()
            each.wait()
    assert found == [True] * 3
    assert same_weights(got, want)
    optimizer.close()


def test_a_clipped_step_is_over_when_step_returns(device: torch.device) -> None:
    """As one that is not clipped: a script may have views of the weights."""
    net = Net(torch.float32).to(device)
    optimizer = make(net, overlap="speculative")
    for step, most in enumerate((NEVER, ALWAYS, ALWAYS, ALWAYS)):
        optimizer.zero_grad()
        torch.autograd.backward(net(step))
        optimizer.clip_grad_norm_(most)
        optimizer.step()
        with torch._C.DisableTorchFunctionSubclass():
            now = [p.detach().cpu() for p in net.parameters()]
        optimizer.wait()
        assert all_equal(now, [p.detach().cpu() for p in net.parameters()])
    optimizer.close()


@pytest.mark.parametrize("replaced", [None, 2.0])
def test_a_gradient_that_is_replaced_takes_the_step_again(
    replaced: float | None, device: torch.device
) -> None:
    want, got = Net(torch.float32).to(device), Net(torch.float32).to(device)
    plain, optimizer = make(want), make(got, overlap="speculative")
    for net, each in ((want, plain), (got, optimizer)):
        for step in range(3):
            torch.autograd.backward(net(step))
            spin(device, 0.02)
            each.clip_grad_norm_(NEVER)  # gradients have been used by now
            first = next(net.parameters())
            first.grad = None if replaced is None else torch.full_like(first, replaced)
            each.step()
            each.zero_grad()
        each.wait()
    assert same_weights(got, want)
    optimizer.close()


def test_a_step_that_cannot_be_taken_leaves_the_old_weights(device: torch.device) -> None:
    net = Net(torch.float32).to(device)
    optimizer = make(net, overlap="speculative")
    before = [p.detach().cpu().clone() for p in net.parameters()]
    torch.autograd.backward(net(0))
    optimizer.clip_grad_norm_(ALWAYS)
    for chunk in optimizer._states().chunks:
        optimizer._states().pipeline.wait_chunk(chunk.number)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(tensorstow.errors.OptionError):
        optimizer.step()
    assert all_equal([p.detach().cpu() for p in net.parameters()], before)
    optimizer.close()
