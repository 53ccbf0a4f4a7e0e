"""What a GradScaler leaves in ``.grad``: what it leaves with torch's own optimizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remote import make_remote
from tensorstow import AdamW, PipelinePolicy
from tensorstow.colossalai import HybridAdam

SCALE = 2.0**12
Make = Callable[[nn.Module], torch.optim.Optimizer]


def ours(directory: Path, **given: Any) -> Make:  # noqa: ANN401
    policy = PipelinePolicy(chunk_elements=64, backend="threads", depth=2)
    stowed: dict[str, Any] = {"states": "disk", "dir": directory, "durability": "none", **given}
    return lambda m: AdamW(m.parameters(), lr=1e-2, module=m, policy=policy, **stowed)


def scaled_step(
    make: Make, *, infinite: bool = False, strided: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients behind ``scaler.step()``, and the weights, waited for."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4))
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    loss = model(torch.ones(3, 5)).square().mean()
    torch.autograd.backward(scaler.scale(loss))
    weight: Any = model[0].weight
    if strided:
        weight.grad = weight.grad.t().contiguous().t()
    if infinite:
        weight.grad[0, 0] = float("inf")
    held = [p.grad for p in model.parameters()]
    scaler.step(optimizer)
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if isinstance(optimizer, AdamW):
        optimizer.wait()
    return grads, [p.detach().clone() for p in model.parameters()]


def torchs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


KINDS: dict[str, Callable[[Path], Make]] = {
    "none": ours,
    "forward": lambda d: ours(d, overlap="forward"),
    "HybridAdam": lambda _: lambda m: HybridAdam(m.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_gradients_are_without_the_scale_as_in_torch(
    kind: str, tmp_path: Path, *, infinite: bool, strided: bool
) -> None:
    want, _ = scaled_step(torchs, infinite=infinite, strided=strided)
    found, after = scaled_step(KINDS[kind](tmp_path), infinite=infinite, strided=strided)
    assert all(map(torch.equal, found, want))

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        optimizer._step_supports_amp_scaling = False  # the scaler unscales
        return optimizer

    if kind != "HybridAdam":
        _, same = scaled_step(plain, infinite=infinite, strided=strided)
        assert all(map(torch.equal, after, same))


def test_gradients_on_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = scaled_step(torchs)
    make_remote(monkeypatch)
    found, _ = scaled_step(ours(tmp_path, overlap="forward"))
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_16_bit_gradient_is_used_before_it_is_rounded(overlap: str, tmp_path: Path) -> None:
    """Divided by the scale it is zero in fp16, which is what the scale is for."""
    small = 2.0**-10
    weights = []
    for scale in (None, 2.0**20):
        model = nn.Linear(4, 4, bias=False).half()
        nn.init.ones_(model.weight)
        optimizer = ours(tmp_path, overlap=overlap)(model)
        model.weight.grad = torch.full_like(model.weight, small)
        if scale is None:  # the same quotient, of an fp32 gradient
            optimizer = AdamW(model.parameters(), lr=1e-2, grad_dtype=None)
            optimizer._step_scaled(2.0**20)
        else:
            optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.wait()  # type: ignore[attr-defined]
            assert not model.weight.grad.any()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.ones(4, 4).half())
