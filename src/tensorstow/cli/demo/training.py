"""The training run of every row: GPT-2 with random weights on random tokens, on the CPU."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tensorstow.cli.demo.result import COMPUTE, OPTIMIZER, Span
from tensorstow.cli.demo.rows import Row, Scale
from tensorstow.colossalai import HybridAdam

LEARNING_RATE = 1e-3
Progress = Callable[[int, str], None]
"""Called with the step and the part of it that begins."""


class GPTLMLoss(nn.Module):
    """Cross entropy of each token's successor."""

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


def config_of(scale: Scale) -> GPT2Config:
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


def make_model(scale: Scale) -> nn.Module:
    """Return the model, the same weights in every process."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(config_of(scale))


def make_optimizer(
    row: Row, scale: Scale, model: nn.Module, directory: str | None
) -> torch.optim.Optimizer:
    """Return the optimizer of ``row``; hyper-parameters are the same for all of them."""
    if row.optimizer == "torch":
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    return HybridAdam(
        model.parameters(),
        lr=LEARNING_RATE,
        nvme_offload_fraction=row.fraction,
        nvme_offload_dir=directory if row.is_offloaded else None,
        policy=scale.policy(row),
    )


@dataclass(slots=True)
class Clock:
    """Spans of the training loop, in seconds of ``time.monotonic()``."""

    progress: Progress
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def measure(self, step: int, name: str) -> Iterator[None]:
        """Log the block as a span of the compute lane."""
        self.progress(step, name)
        start = time.monotonic()
        yield
        self.spans.append(Span(COMPUTE, name, start, time.monotonic(), step))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, scale: Scale, steps: int, clock: Clock
) -> list[float]:
    """Take ``steps`` steps; return their losses."""
    criterion = GPTLMLoss()
    tokens = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # dropout: the same, whatever making the optimizer has drawn
    losses = []
    for step in range(steps):
        with clock.measure(step, "forward"):
            input_ids = torch.randint(
                scale.vocabulary, (scale.batch, scale.sequence), generator=tokens
            )
            mask = torch.ones_like(input_ids)
            logits = model(input_ids=input_ids, attention_mask=mask).logits
            loss = criterion(logits, input_ids)
        with clock.measure(step, "backward"):
            loss.backward()
        with clock.measure(step, OPTIMIZER):
            optimizer.step()
        with clock.measure(step, "zero_grad"):
            optimizer.zero_grad()
        losses.append(loss.item())
        del logits, loss
    return losses


def checksum(model: nn.Module) -> str:
    """Return a SHA-256 over the names and bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
