"""Four ranks: replicas of shards (HSDP), and every stage, to the bit.

Gradients are sums of small whole numbers, so they are the same in any order of summation.
"""

import pytest
import torch
from torch import nn

from ranks.pool import Pool
from ranks.twin import Twins
from tensorstow import Plan


class Whole(nn.Module):
    """Layers whose gradients are whole numbers, whatever the weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(2))  # fewer rows than ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(block(x).sum() for block in self.blocks) + (self.gain * x.sum()).sum()


def loss(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + batch)
    # Multiples of four: the mean over four ranks is whole, too.
    return model(4.0 * torch.randint(-9, 9, (6, 5), generator=generator).float())


def trained(plan: Plan) -> tuple[float, int]:
    """Return the norm that clipping found, and the bytes of states here."""
    both = Twins(Whole, loss, plan)
    for step in range(3):
        for micro in range(plan.accumulation_steps):
            both.backward(2 * step + micro)
        both.compare_gradients()
        ours, theirs = both.each(lambda _, optimizer: optimizer.clip_grad_norm_(10.0))
        assert ours == theirs
        norm = nn.utils.get_total_norm([p.grad for p in both.stowed.parameters()])
        torch.testing.assert_close(norm.full_tensor().double(), theirs, rtol=1e-6, atol=0.0)
        both.step()
    held = both.ours._memory().logical_bytes
    both.close()
    return float(ours), held


@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicas=2),
        Plan(replicas=2, overlap="forward", states="disk"),
        Plan(replicas=2, accumulation_steps=2),
        Plan(replicas=2, stage=2),
        Plan(replicas=2, parameters="disk", states="disk"),
        Plan(stage=3, accumulation_steps=2),
        Plan(stage=2, accumulation_steps=2),
        Plan(stage=1, accumulation_steps=2),
        Plan(stage=0),
    ],
    ids=lambda p: f"x{p.replicas}-z{p.stage}-{p.overlap}-{p.parameters}-{p.accumulation_steps}",
)
def test_four_ranks_have_the_bits_of_one(ranks: Pool, plan: Plan) -> None:
    found = ranks(4).run(trained, plan)
    assert len({norm for norm, _ in found}) == 1
    copies = 4 if plan.stage == 0 else plan.replicas
    elements = sum(p.numel() for p in Whole().parameters())
    assert sum(held for _, held in found) == copies * 8 * elements
