"""Whole models through `stow` on an accelerator: the bits of the same training on the device."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
from compare import all_equal
from models import ResidualStack
from parity.architectures import ARCHITECTURES, Checkpointed
from ranks.stowed import finish, groups_of, loss_of, model_of
from tensorstow import Plan

PLANS = [
    Plan(parameters="device"),
    Plan(parameters="device", overlap="forward"),
    Plan(parameters="device", states="disk"),
    Plan(parameters="device", update_on="device"),
    Plan(parameters="device", states="disk", update_on="device"),
    Plan(parameters="host"),
    Plan(parameters="host", states="disk", overlap="forward"),
    Plan(parameters="host", states="disk", overlap="backward"),
    Plan(parameters="disk", states="disk"),
    Plan(parameters="disk", states="disk", overlap="backward"),
    Plan(parameters="disk", states="disk", overlap="forward"),
    Plan(parameters="host", parameter_units={"blocks.1": "device", "blocks.2": "disk"}),
    Plan(parameters="host", parameter_units={"blocks.1": "device"}, overlap="forward"),
    Plan(parameters="host", parameter_units={"blocks.1": "device"}, overlap="backward"),
]


class OnDevice(nn.Module):
    """Takes tokens from the CPU to where the model is."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Wrap ``model``."""
        super().__init__()
        self.model, self.device = model, device

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits on the CPU."""
        return self.model(tokens.to(self.device)).cpu()


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stowed_training_has_the_bits_of_training_on_the_device(
    device: torch.device, plan: Plan, dtype: torch.dtype
) -> None:
    def train(model: nn.Module, optimizer: tensorstow.AdamW) -> list[torch.Tensor]:
        for step in range(3):
            loss_of(OnDevice(model, device), 0, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [w.cpu() for w in finish(model, optimizer)]

    plain = model_of(dtype).to(device)
    want = train(plain, groups_of(list(plain.named_parameters())))
    model, optimizer = tensorstow.stow(model_of(dtype), partial(groups_of), plan=plan)
    got = train(model, optimizer)
    assert all_equal(got, want)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("parameters", ["device", "host", "disk"])
@pytest.mark.parametrize("name", ["encoder-decoder", "repeated", "branches", "checkpointed"])
def test_tensors_with_uses_in_several_units_have_the_bits_too(
    device: torch.device, name: str, parameters: str
) -> None:
    make = {**ARCHITECTURES, "checkpointed": Checkpointed}[name]

    def train(model: nn.Module, optimizer: tensorstow.AdamW) -> list[torch.Tensor]:
        for batch in range(3):
            with device:
                loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [w.cpu() for w in finish(model, optimizer)]

    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    plain.to(device)
    want = train(plain, tensorstow.AdamW(plain.parameters(), lr=0.01))
    plan = Plan(parameters=parameters)
    model, optimizer = tensorstow.stow(model, partial(tensorstow.AdamW, lr=0.01), plan=plan)
    assert all_equal(train(model, optimizer), want)


@pytest.mark.parametrize("parameters", ["device", "host"])
def test_a_unit_whose_update_nobody_waited_for_keeps_its_gradient(
    device: torch.device, parameters: str
) -> None:
    """The gradients of the next step come down while its own is still to be used."""

    def train(model: nn.Module, optimizer: tensorstow.AdamW) -> list[torch.Tensor]:
        for skipped in (None, 2, 0, None, 3):
            model(torch.ones(4, 64, device=device), skipped).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [w.cpu() for w in finish(model, optimizer)]

    torch.manual_seed(0)
    plain = ResidualStack(64, 4)
    model = copy.deepcopy(plain)
    plain.to(device)
    want = train(plain, tensorstow.AdamW(plain.parameters(), lr=0.01))
    plan = Plan(parameters=parameters, overlap="forward")
    model, optimizer = tensorstow.stow(model, partial(tensorstow.AdamW, lr=0.01), plan=plan)
    assert all_equal(train(model, optimizer), want)


@pytest.mark.usefixtures("garbage_apart")
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_gradients_leave_the_device(device: torch.device, overlap: str) -> None:
    whole = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).bfloat16()
    plan = Plan(parameters="device", overlap=overlap)
    model, optimizer = tensorstow.stow(whole, partial(tensorstow.AdamW, lr=1e-3), plan=plan)
    x = torch.ones(1, 1024, dtype=torch.bfloat16, device=device)
    before = torch.accelerator.memory_allocated()
    model(x).sum().backward()
    torch.accelerator.synchronize()
    with torch.no_grad():
        model(x)  # the device has its memory back by the next forward
    assert torch.accelerator.memory_allocated() - before < 2 * 1024 * 1024 * 2
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    optimizer.wait()
    optimizer.close()


def keep_busy(device: torch.device) -> None:
    """Let the current stream do nothing for 0.1 s."""
    if device.type == "cuda":
        torch.cuda._sleep(300_000_000)
    elif device.type == "simulated":
        import simulated  # noqa: PLC0415  # registers the device, which others than it must not

        simulated.busy(0.1)
    else:
        pytest.skip(f"nothing keeps {device.type} busy")


def test_what_a_state_dict_returns_may_be_written_to_at_once(device: torch.device) -> None:
    """Over one rank it is host memory itself, which copies to a busy device would still read."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    x = torch.ones(2, 64)
    with torch.no_grad():
        want = model(x)
    model, optimizer = tensorstow.stow(
        model, partial(tensorstow.AdamW, lr=1e-3), plan=Plan(parameters="host")
    )
    with optimizer, torch.no_grad():
        for _ in range(2):
            keep_busy(device)
            found = model(x.to(device))
            for value in model.state_dict().values():
                value.zero_()
            assert torch.allclose(found.cpu(), want, rtol=1e-4, atol=1e-6)
            want = torch.zeros_like(want)


class Late(torch.autograd.Function):
    """Keeps the device busy in backward; ``over`` gets what tells when it is not any more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, over: list[torch.Event]) -> torch.Tensor:  # noqa: ANN401
        ctx.over = over
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        keep_busy(gradients[0].device)
        ctx.over.append(torch.accelerator.current_stream().record_event())
        return gradients[0], None


class LateLinear(nn.Linear):
    """The gradient of its weight is late."""

    over: list[torch.Event]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return Late.apply(super().forward(x), self.over)


def test_beside_backward_nobody_waits_for_a_gradient_to_come_down(device: torch.device) -> None:
    over: list[torch.Event] = []
    is_over: list[bool] = []
    layers = [LateLinear(64, 64, bias=False) for _ in range(3)]
    for layer in layers:
        layer.over = over
    make = partial(tensorstow.AdamW, lr=1e-3)
    plan = Plan(parameters="host", overlap="backward")
    model, optimizer = tensorstow.stow(nn.Sequential(*layers), make, plan=plan)
    for parameter in model.parameters():  # behind the hooks that take it down and use it
        parameter.register_post_accumulate_grad_hook(lambda _: is_over.append(over[-1].query()))
    x = torch.ones(1, 64, device=device)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert is_over == [False] * 6
    optimizer.close()
