"""One run of ColossalAI's Gemini example in a process of its own.

``python -m demo.gemini_worker`` writes the result, a line of JSON, to the file descriptor that
``--descriptor`` names.
"""

import argparse
import json
import os
import time
from dataclasses import asdict

import torch

from demo.configurations import FULL, SMALL, ModelSize
from demo.gemini import POLICIES, STEPS, WITHOUT, GeminiResult
from demo.training import GPTLMLoss, make_model
from demo.worker import add_arguments
from tensorstow.cli.process import say
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import GeminiPlugin
from tensorstow.colossalai.nn.optimizer import HybridAdam
from tensorstow.colossalai.utils import get_current_device
from tensorstow.report.rss import peak_bytes, resident_bytes


def main(arguments: list[str] | None = None) -> None:
    """Run the example with the given arguments."""
    parser = argparse.ArgumentParser(prog="demo.gemini_worker")
    parser.add_argument("--policy", choices=POLICIES, required=True)
    parser.add_argument("--fraction", type=float, required=True)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    with os.fdopen(options.descriptor, "w", encoding="utf-8") as pipe:
        scale = SMALL if options.small else FULL
        result = train(options.policy, options.fraction, scale, options.directory)
        say(pipe, json.dumps(asdict(result)))


def train(policy: str, fraction: float, scale: ModelSize, directory: str) -> GeminiResult:
    """Train as ``train_cpu`` or ``train_gemini_cpu`` of the page does."""
    model = make_model(scale)
    criterion = GPTLMLoss()
    place = directory if fraction else None
    optimizer: torch.optim.Optimizer = HybridAdam(
        model.parameters(), nvme_offload_fraction=fraction, nvme_offload_dir=place
    )
    backward, device = _backward, torch.device("cpu")
    if policy != WITHOUT:
        device = get_current_device()
        booster = Booster(plugin=_plugin(policy, scale))
        model, optimizer, _, _, _ = booster.boost(model, optimizer)
        backward = booster.backward
    losses = []
    tokens = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # dropout
    start = time.monotonic()
    for _ in range(STEPS):
        shape = (scale.batch, scale.sequence)
        ids = torch.randint(scale.vocabulary, shape, generator=tokens).to(device)
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        loss = criterion(outputs.logits, ids)
        backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.monotonic() - start
    return GeminiResult(policy, fraction, tuple(losses), seconds, resident_bytes(), peak_bytes())


def _plugin(policy: str, scale: ModelSize) -> GeminiPlugin:
    """Return the example's plugin; it computes in fp32, so that all rows are comparable."""
    return GeminiPlugin(
        placement_policy=policy,
        strict_ddp_mode=True,
        pin_memory=True,
        hidden_dim=scale.width,
        initial_scale=2**5,
        precision="fp32",
    )


def _backward(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    loss.backward()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
