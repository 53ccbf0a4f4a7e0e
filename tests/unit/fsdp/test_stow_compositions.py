"""Blocks that are computed again in backward, or compiled."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks.pool import Pool, RankError
from ranks.stowed import loss_of, model_of, twins
from ranks.twin import FETCHED, FETCHED_BESIDE, Twins
from tensorstow import Plan

PLANS = [
    Plan(),
    Plan(overlap="forward", states="disk"),
    Plan(overlap="backward", states="disk"),
    Plan(stage=1),
    Plan(stage=2),
    FETCHED,
    FETCHED_BESIDE,
]


class Recomputing(nn.Module):
    """Keeps of each block its input alone."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = model_of(torch.float32)
        self.reentrant = reentrant
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.inner.embedding(tokens)
        for block in self.inner.blocks:

            def run(x: torch.Tensor, block: nn.Module = block) -> torch.Tensor:
                self.calls += 1
                return block(x)

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.inner.head(x)


def recomputed(plan: Plan, way: str) -> int:
    both = Twins(lambda: Recomputing(reentrant=way == "reentrant"), loss_of, plan)
    both.train()
    both.close()
    return both.stowed.calls


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"z{p.stage}-{p.overlap}-{p.parameters}")
def test_blocks_may_be_computed_again(ranks: Pool, plan: Plan, world: int) -> None:
    assert ranks(world).run(recomputed, plan, "once more") == [12] * world
    if plan.overlap != "backward":
        assert ranks(world).run(recomputed, plan, "reentrant") == [12] * world


def test_passes_within_backward_are_refused_where_updates_run_beside_it(ranks: Pool) -> None:
    with pytest.raises(RankError, match="use_reentrant=False"):
        ranks(1).run(recomputed, Plan(overlap="backward"), "reentrant")


def compiled(plan: Plan) -> list[int]:
    """Compile every block; return how many graphs each had."""
    torch._dynamo.reset()
    both = twins(plan)
    graphs = [0]

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs[0] += 1
        return graph.forward

    for block in both.stowed.blocks:
        block.compile(backend=backend)
    both.train(range(3))
    both.close()
    return graphs


@pytest.mark.parametrize("plan", [Plan(), Plan(overlap="forward"), FETCHED], ids=str)
def test_blocks_may_be_compiled(ranks: Pool, plan: Plan) -> None:
    for (graphs,) in ranks(2).run(compiled, plan):
        assert 0 < graphs < 2 * 3  # not anew in every step, for weights that came anew
