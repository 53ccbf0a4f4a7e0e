"""The chunked cross entropy and tiled layers on an accelerator."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import tensorstow
from tensorstow import PipelinePolicy, Plan
from tensorstow.losses import chunked_cross_entropy
from tensorstow.nn import TiledLinear

CLASSES, WIDTH, ROWS = 301, 24, 37
MOST = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Relative to the largest element. 16-bit products are of the rounded gradient of logits there."""


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_loss_and_gradients(device: torch.device, dtype: torch.dtype, reduction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    labels[3:9] = -100
    given = [v.to(device).requires_grad_() for v in values]
    loss = chunked_cross_entropy(
        given[0],
        given[1],
        labels.to(device),
        bias=given[2],
        chunk_bytes=f"{40 * CLASSES}B",
        reduction=reduction,  # type: ignore[arg-type]
        label_smoothing=0.1,
    )
    loss.sum().backward()
    exact = [v.double().requires_grad_() for v in values]
    logits = exact[0] @ exact[1].T + exact[2]
    wanted = functional.cross_entropy(logits, labels, reduction=reduction, label_smoothing=0.1)
    wanted.sum().backward()
    assert (loss.detach().cpu() - wanted).abs().max() <= 2.0**-18 * wanted.abs().max()
    for found, truth in zip(given, exact, strict=True):
        assert found.grad is not None
        assert truth.grad is not None
        difference = (found.grad.cpu().double() - truth.grad).abs().max()
        assert difference <= MOST[dtype] * truth.grad.abs().max()


class Tiled(nn.Module):
    """A tiled layer in a block, and a loss of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(TiledLinear(32, 128, out_splits=4), nn.Tanh(), nn.Linear(128, 32))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_tiles_on_any_tier(device: torch.device, tmp_path: Path) -> None:
    def trained(plan: Plan, place: Path) -> list[torch.Tensor]:
        torch.manual_seed(0)
        make = partial(tensorstow.AdamW, lr=1e-2, policy=PipelinePolicy(chunk_elements=1024))
        model, optimizer = tensorstow.stow(Tiled(), make, plan=plan, dir=place)
        for step in range(2):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
            model(x.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        weights = [v.cpu().clone() for v in model.state_dict().values()]
        optimizer.close()
        return weights

    wanted = trained(Plan(parameters="device", states="host"), tmp_path / "device")
    tile = {"blocks.0.0.linears.1.0": "device", "blocks.1.0.linears.2.0": "host"}
    for name, plan in {
        "host": Plan(parameters="host", states="disk", overlap="backward"),
        "disk": Plan(parameters="disk", states="disk", parameter_units=tile),
    }.items():
        found = trained(plan, tmp_path / name)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name
