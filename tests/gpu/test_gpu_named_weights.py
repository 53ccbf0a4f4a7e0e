"""Weights one by one from a model on an accelerator, into host memory or onto the device."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

import tensorstow
from models import ResidualStack
from tensorstow import Plan, named_weights
from tensorstow.base.errors import OptionError

WIDTH = 32
PLANS = [
    Plan(parameters="device"),
    Plan(parameters="device", overlap="forward"),
    Plan(parameters="device", overlap="backward"),
    Plan(parameters="device", states="disk", update_on="device", overlap="backward"),
    Plan(parameters="host", states="disk", overlap="forward"),
    Plan(parameters="host", stage=2),
    Plan(parameters="disk", states="disk", overlap="backward"),
    Plan(parameters="disk", states="disk", overlap="forward"),
    Plan(parameters="host", parameter_units={"blocks.1": "device", "blocks.2": "disk"}),
]
Named = dict[str, torch.Tensor]


def same(first: Named, second: Named) -> bool:
    return list(first) == list(second) and all(
        torch.equal(first[k].cpu(), second[k].cpu()) for k in first
    )


def whole(parameter: torch.Tensor) -> torch.Tensor:
    full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach().cpu()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_from_every_tier_come_the_bits_of_the_last_step(device: torch.device, plan: Plan) -> None:
    torch.manual_seed(0)
    model = ResidualStack(WIDTH, 4).bfloat16()
    model, optimizer = tensorstow.stow(model, tensorstow.AdamW, plan=plan, lr=1e-2)
    x = torch.randn(4, WIDTH).bfloat16().to(device)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    kept: list[tuple[Named, Named]] = []
    for _ in range(3):
        step()
        received = dict(named_weights(model, device=device))
        assert all(t.device == device for t in received.values())
        optimizer.wait()
        wanted = {name: whole(p) for name, p in model.named_parameters()}
        assert same(received, wanted)
        assert same(dict(named_weights(model)), wanted)
        kept.append((received, wanted))
        iterator = named_weights(model, device=device)
        next(iterator)
        model(x)
        next(iterator)
        step()
        with pytest.raises(OptionError, match="was changed since"):
            list(iterator)
    assert all(same(received, wanted) for received, wanted in kept)
    assert not same(*(received for received, _ in kept[:2]))
    optimizer.close()


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_model_that_is_only_read(device: torch.device, tmp_path: Path, tier: str) -> None:
    torch.manual_seed(0)
    net = ResidualStack(WIDTH, 4)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model: nn.Module = ResidualStack(WIDTH, 4)
    model, _ = tensorstow.stow(model, None, plan=Plan(parameters=tier), weights=tmp_path)
    wanted = {name: p.detach() for name, p in net.named_parameters()}
    x = torch.randn(4, WIDTH).to(device)
    for _ in range(2):
        assert same(dict(named_weights(model)), wanted)
        assert same(dict(named_weights(model, device=device)), wanted)
        with torch.no_grad():
            model(x)
