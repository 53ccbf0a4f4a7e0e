"""The calls of ColossalAI's example of GPT with Gemini (examples/language/gpt/gemini)."""

import logging
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import pytest
import torch
from packaging import version
from torch import nn

import tensorstow.colossalai as colossalai
from tensorstow.colossalai.accelerator import get_accelerator
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from tensorstow.colossalai.lazy import LazyInitContext
from tensorstow.colossalai.logging import disable_existing_loggers, get_dist_logger
from tensorstow.colossalai.nn.optimizer import HybridAdam

WIDTH = 32
PLANS = ("CAI_ZeRO1", "CAI_ZeRO2", "CAI_Gemini", "Pytorch_DDP")


def plugin_of(plan: str) -> Any:  # noqa: ANN401
    if plan == "CAI_Gemini":
        return GeminiPlugin(search_range_m=128, hidden_dim=WIDTH)
    if plan == "Pytorch_DDP":
        return TorchDDPPlugin()
    return LowLevelZeroPlugin(
        stage=int(plan[-1]), reduce_bucket_size_in_m=12, overlap_communication=True, verbose=True
    )


def losses_of(plan: str) -> list[float]:
    """Train by one of the example's plans; return the losses that it logs."""
    colossalai.launch_from_torch()
    logger = get_dist_logger("example")
    torch.manual_seed(123)
    device = get_accelerator().get_current_device()
    lazy = plan == "CAI_Gemini"
    with LazyInitContext(default_device=device) if lazy else nullcontext():
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        model = nn.Sequential(nn.Embedding(64, WIDTH), *blocks, nn.Linear(WIDTH, 64))
    kind = torch.optim.Adam if plan.startswith("Pytorch") else HybridAdam
    optimizer = kind(model.parameters(), lr=1e-3)
    booster = Booster(plugin=plugin_of(plan))
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    numel = sum(p.numel() for m in model.modules() for p in m.parameters(recurse=False))
    losses = []
    model.train()
    for step in range(3):
        ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        get_accelerator().synchronize()
        start = perf_counter()
        logits = model(ids).float()
        loss = criterion(logits[:, :-1].reshape(-1, 64), ids[:, 1:].reshape(-1))
        booster.backward(loss, optimizer)
        optimizer.step()
        flops = numel * 2 * 16 * 8 / (perf_counter() - start)
        said = f"[{step + 1}/3] Loss:{loss.item():.3f}, FLOPS: {flops:.0f}"
        logger.info(said, ranks=[0])
        losses.append(loss.item())
    if hasattr(optimizer.unwrap(), "close"):
        optimizer.unwrap().close()
    return losses


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the plans have other precisions")
def test_every_plan_of_the_example_has_the_losses_of_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert version.parse(colossalai.__version__) >= version.parse("0.2.0")
    disable_existing_loggers(include=["example"])
    get_dist_logger.cache_clear()
    found = {plan: losses_of(plan) for plan in PLANS}
    get_dist_logger.cache_clear()
    logging.getLogger("example").handlers.clear()
    assert capsys.readouterr().err.count("colossalai - example - INFO: [3/3] Loss:") == len(PLANS)
    assert found["CAI_ZeRO1"] == found["CAI_ZeRO2"] == found["CAI_Gemini"]
    assert found["CAI_Gemini"] == pytest.approx(found["Pytorch_DDP"], rel=1e-4)
