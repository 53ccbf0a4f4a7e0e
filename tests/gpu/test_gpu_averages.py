"""Averages of weights of models that an accelerator computes with, wherever they live."""

from functools import partial

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow import AdamW, Plan
from tensorstow.base.update_on import UpdateOn

PLANS = {
    "device": Plan(),
    "host": Plan(parameters="host"),
    "forward": Plan(parameters="host", overlap="forward"),
    "disk": Plan(parameters="disk", states="disk"),
    "mixed": Plan(parameters="host", parameter_units={"1": "disk", "2": "device"}),
}
WIDTH = 64


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks).to(dtype)


def train(model: nn.Module, optimizer: AdamW, x: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_the_device_computes_with_averages_inside(
    plan: str, dtype: torch.dtype, device: torch.device
) -> None:
    factory = partial(AdamW, lr=1e-2, ema=0.7)
    model, optimizer = tensorstow.stow(make_model(dtype), factory, plan=PLANS[plan])
    names = [name for name, _ in model.named_parameters()]
    x = torch.linspace(-1, 1, 2 * WIDTH, device=device).view(2, WIDTH).to(dtype)
    train(model, optimizer, x, 3)
    for _ in range(2):
        with torch.no_grad():
            outside = model(x).clone()
            states = [optimizer.states_of(p) for p in model.parameters()]
            with optimizer.averaged(model):
                inside = model(x).clone()
                again = model(x).clone()
            after = model(x).clone()
        alone = make_model(dtype)
        averages = [s["ema"].to(dtype) for s in states if s is not None]
        alone.load_state_dict(dict(zip(names, averages, strict=True)))
        assert torch.equal(alone.to(device)(x), inside)
        assert torch.equal(again, inside)
        assert torch.equal(after, outside)
        assert not torch.equal(inside, outside)
        train(model, optimizer, x, 2)
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("update_on", ["device", "hybrid", 0.5])
def test_updates_on_the_device_have_the_bits_of_the_host(
    update_on: UpdateOn, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.linspace(-1, 1, 2 * WIDTH, device=device).view(2, WIDTH).to(dtype)
    ended = []
    for where in ("host", update_on):
        model = make_model(dtype).to(device)
        optimizer = AdamW(model.parameters(), lr=1e-2, ema=0.7, update_on=where)
        train(model, optimizer, x, 4)
        with optimizer.averaged(model):
            pass
        train(model, optimizer, x, 2)
        states = optimizer.state_dict()["state"].values()
        ended.append([t.clone() for entry in states for t in entry.values()])
        ended[-1] += [p.detach().clone() for p in model.parameters()]
        optimizer.close()
    assert all(map(torch.equal, *ended))
