"""The training run of every configuration: GPT-2 with random weights and tokens, on the CPU."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tensorstow
from demo.configurations import Configuration, ModelSize
from tensorstow import AdamW, Plan, Tier
from tensorstow.cli.process import OPTIMIZER
from tensorstow.colossalai import HybridAdam
from tensorstow.report.spans import COMPUTE, TimeSpan

LEARNING_RATE = 1e-3
Progress = Callable[[int, str], None]
"""Called with the step and the part of it that begins."""


class GPTLMLoss(nn.Module):
    """The cross entropy of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        loss: torch.Tensor = self.loss_fn(
            shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1)
        )
        return loss


def config_of(scale: ModelSize) -> GPT2Config:
    """Return the configuration of the model."""
    return GPT2Config(
        n_layer=scale.layers,
        n_head=scale.heads,
        n_embd=scale.width,
        vocab_size=scale.vocabulary,
        n_positions=scale.positions,
        bos_token_id=scale.vocabulary - 1,
        eos_token_id=scale.vocabulary - 1,
    )


def make_model(scale: ModelSize) -> nn.Module:
    """Return the model; its weights are the same in every process."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(config_of(scale))


def make_optimizer(
    row: Configuration, scale: ModelSize, model: nn.Module, directory: str | None
) -> torch.optim.Optimizer:
    """Return the optimizer of a configuration; hyper-parameters are the same for all.

    Some configurations stow ``model``.
    """
    keywords: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": 0.0}
    if row.optimizer == "torch":
        return torch.optim.AdamW(model.parameters(), **keywords, fused=True)
    keywords["policy"] = scale.policy(row)
    if row.optimizer == "HybridAdam":
        place = directory if row.is_offloaded else None
        return HybridAdam(
            model.parameters(),
            nvme_offload_fraction=row.fraction,
            nvme_offload_dir=place,
            **keywords,
        )
    keywords["durability"] = "none"
    if row.optimizer == "stow":
        plan = Plan(
            parameters=Tier.DISK,
            states=Tier.DISK,
            overlap=row.overlap,
            weight_ram_budget=scale.weight_ram_budget,
        )
        _, optimizer = tensorstow.stow(model, partial(AdamW, **keywords), plan=plan, dir=directory)
        return optimizer
    return AdamW(
        model.parameters(),
        states=row.fraction,
        dir=directory,
        overlap=row.overlap,
        module=model,
        **keywords,
    )


@dataclass(slots=True)
class Clock:
    """Spans of the training loop, in seconds of ``time.monotonic()``."""

    progress: Progress
    spans: list[TimeSpan] = field(default_factory=list)

    @contextmanager
    def measure(self, step: int, name: str) -> Iterator[None]:
        """Log the block as a span of the compute lane."""
        self.progress(step, name)
        start = time.monotonic()
        yield
        self.spans.append(TimeSpan(COMPUTE, name, start, time.monotonic(), step))


class Training:
    """The training loop, run a few steps at a time."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scale: ModelSize, clock: Clock
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.losses: list[float] = []
        self._scale = scale
        self._clock = clock
        self._criterion = GPTLMLoss()
        self._tokens = torch.Generator().manual_seed(1)
        torch.manual_seed(2)  # dropout: independent of the numbers that the optimizer drew

    def take(self, steps: int) -> None:
        """Take ``steps`` further steps."""
        for _ in range(steps):
            step = len(self.losses)
            loss = self.make_gradients(step)
            with self._clock.measure(step, OPTIMIZER):
                self.optimizer.step()
            with self._clock.measure(step, "zero_grad"):
                self.optimizer.zero_grad()
            self.losses.append(loss)

    def make_gradients(self, step: int) -> float:
        """Run forward and backward on the next batch; return its loss."""
        with self._clock.measure(step, "forward"):
            shape = (self._scale.batch, self._scale.sequence)
            ids = torch.randint(self._scale.vocabulary, shape, generator=self._tokens)
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            loss: torch.Tensor = self._criterion(logits, ids)
        with self._clock.measure(step, "backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def kept(self) -> dict[str, torch.Tensor]:
        """Return the states of the random number generators, for a commit."""
        return {"dropout": torch.get_rng_state(), "tokens": self._tokens.get_state()}

    def go_on(self, steps: int, generators: Mapping[str, torch.Tensor]) -> None:
        """Continue after ``steps`` steps of another process."""
        self.losses = [math.nan] * steps
        torch.set_rng_state(generators["dropout"])
        self._tokens.set_state(generators["tokens"])
