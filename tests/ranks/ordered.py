"""Training with sums of gradients in the order of micro-batches: what tests call in each rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import tensorstow
from ranks.durable import digest
from ranks.twin import whole
from tensorstow import Plan
from tensorstow.fsdp.sharding import current_device

MICRO_BATCHES = 12
"""Of one step, over all ranks: 1, 2, 3 and 4 divide it."""


class Tied(nn.Module):
    """An embedding that is the head too, blocks with odd rows, and a scalar."""

    def __init__(self, *, scalar: bool, branches: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 17), nn.GELU(), nn.Linear(17, 12))
            for _ in range(2)
        )
        self.head = nn.Linear(12, 19, bias=False)
        self.head.weight = self.embedding.weight
        self.even, self.odd = (nn.Linear(12, 12) if branches else None for _ in range(2))
        self.number = 0
        """Of the micro-batch, which decides on a branch."""
        self.scale = nn.Parameter(torch.tensor(0.7)) if scalar else 0.7

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        branch = self.odd if self.number % 2 else self.even
        if branch is not None:
            x = x + branch(x)
        return self.head(x) * self.scale


def loss_of(model: Tied, number: int, device: torch.device) -> torch.Tensor:
    """Return the loss of the micro-batch of this number, whichever rank it is on."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 19, (3, 7), generator=generator).to(device)
    model.number = number
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def ordered(  # noqa: PLR0913  # what a run may differ in
    plan: Plan | None,
    *,
    steps: int = 3,
    micro_batches: int = MICRO_BATCHES,
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
    scalar: bool = False,
    branches: bool = False,
    frozen: bool = False,
    unfrozen_at: int = -1,
    **options: Any,  # noqa: ANN401  # AdamW's
) -> dict[str, str]:
    """Train on this rank's micro-batches of each step; return digests, and the last norm."""
    torch.manual_seed(3)
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), current_device()
    model: Any = Tied(scalar=scalar, branches=branches).to(dtype)
    model.blocks[0].requires_grad_(not frozen)
    per_rank = micro_batches // ranks
    plan = (plan or Plan()).but(accumulation_steps=per_rank)
    model, optimizer = tensorstow.stow(model, tensorstow.AdamW, lr=1e-2, plan=plan, **options)
    divisor = micro_batches if plan.ordered_reduce == "sum" else per_rank
    norms = []
    start = optimizer.resume() if "dir" in options else 0
    for step in range(start or 0, steps):
        if step == unfrozen_at:
            model.blocks[0].requires_grad_()
        for turn in range(per_rank):
            number = (step * per_rank + turn) * ranks + rank
            (loss_of(model, number, device) / divisor).backward()
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(clip).item().hex())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    digests = {name: digest(whole(value).cpu()) for name, value in model.state_dict().items()}
    optimizer.close()
    return digests | {"norms": " ".join(norms[-1:])}


def refused(plan: Plan, mistake: str) -> str:
    """Make a mistake in a step; return what is raised."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = tensorstow.stow(model, tensorstow.AdamW, lr=1e-2, plan=plan)
    try:
        if mistake == "unreduced":
            model.set_requires_gradient_sync(False)
        if mistake == "force_sum":
            for part in model.modules():
                if isinstance(part, FSDPModule):
                    part.set_force_sum_reduction_for_comms(True)
        loss = model(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=mistake == "twice")
        if mistake == "twice":
            loss.backward()
    except tensorstow.StowError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        optimizer.close()
    return "nothing was raised"
