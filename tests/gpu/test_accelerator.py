"""Parameters on an accelerator: the bits of the CPU, through streams that are really late."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compare import all_equal
from models import ResidualLinear
from tensorstow import AdamW, PipelinePolicy

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="there is no accelerator here"
)
SIZES = [(300, 70), (5000,), (3,), (64, 64)]
POLICY = PipelinePolicy(chunk_elements=4096)
STEPS = 4


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def numbers(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def stepped(where: torch.device, dtype: torch.dtype, **given: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """Take steps by gradients that are the same everywhere; return the weights on the CPU."""
    weights = [nn.Parameter(w.to(where)) for w in numbers(100, dtype)]
    optimizer = AdamW(weights, lr=1e-2, policy=POLICY, **given)
    for step in range(STEPS):
        for weight, gradient in zip(weights, numbers(step, dtype), strict=True):
            weight.grad = gradient.to(where)
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
    optimizer.wait()
    traffic = optimizer._traffic()
    if where.type != "cpu":
        nbytes = sum(w.nbytes for w in weights)
        assert traffic.bytes_down >= STEPS * nbytes  # gradients, in their own dtype
        assert traffic.bytes_up >= STEPS * nbytes  # and the new weights
    optimizer.close()
    return [w.detach().cpu() for w in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("states", ["ram", "disk"])
def test_weights_are_those_of_the_cpu(dtype: torch.dtype, states: str, tmp_path: Path) -> None:
    place = {"dir": tmp_path, "durability": "none"} if states == "disk" else {}
    there = stepped(device(), dtype, states=states, **place)
    here = stepped(torch.device("cpu"), dtype, states=states, **place)
    for a, b in zip(there, here, strict=True):
        assert torch.equal(a, b)


def trained(directory: Path, overlap: str) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(ResidualLinear(64) for _ in range(4))).to(device(), torch.bfloat16)
    optimizer = AdamW(
        model.parameters(), lr=1e-2, states="disk", dir=directory, durability="none",
        overlap=overlap, module=model, policy=POLICY,
    )  # type: ignore[arg-type]  # fmt: skip  # a parameter is text
    losses = []
    for step in range(6):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        loss = model(x.to(device(), torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.wait()
    weights = [p.detach().cpu() for p in model.parameters()]
    optimizer.close()
    return losses, weights


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_schedules_give_the_same_bits(overlap: str, tmp_path: Path) -> None:
    losses, weights = trained(tmp_path, overlap)
    wanted, others = trained(tmp_path, "none")
    assert losses == wanted
    assert all_equal(weights, others)


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    weight = nn.Parameter(numbers(100, torch.bfloat16)[0].to(device()))
    gradients = [numbers(step, torch.bfloat16)[0].to(device()) for step in range(STEPS)]
    optimizer = AdamW([weight], states="disk", dir=tmp_path, policy=POLICY, commit_every=2)
    for step in range(2):
        weight.grad = gradients[step]
        optimizer.step()
    optimizer.close()
    with torch.no_grad():
        weight.zero_()
    optimizer = AdamW([weight], states="disk", dir=tmp_path, policy=POLICY)
    assert optimizer.resume() == 2
    for step in range(2, STEPS):
        weight.grad = gradients[step]
        optimizer.step()
    optimizer.close()
    other = nn.Parameter(numbers(100, torch.bfloat16)[0].to(device()))
    optimizer = AdamW([other], policy=POLICY)
    for gradient in gradients:
        other.grad = gradient
        optimizer.step()
    assert torch.equal(weight, other)
    optimizer.close()
