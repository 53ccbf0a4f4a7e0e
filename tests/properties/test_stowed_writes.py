"""What others read and write of a parameter without memory is the parameter, whole or in part."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from parity.cover import crossed
from ranks.pool import Ranks
from ranks.twin import Twins, weights_of
from tensorstow.base.plan import Plan
from tensorstow.fsdp.stow import stow
from tensorstow.optim.adam import AdamW

Pool = Callable[[int], Ranks]
Act = Callable[[torch.Tensor], object]
PLANS = [Plan(states="disk"), Plan(parameters="disk", states="disk", prefetch=0)]
MAKE = partial(AdamW, lr=1e-2)
STOWED = partial(MAKE, durability="none")
WRITES: dict[str, Act] = {
    "row": lambda p: p[2].fill_(0.5),
    "rows": lambda p: p[:3].zero_(),
    "columns": lambda p: p[:, 1:3].mul_(2),
    "row of rows": lambda p: p[1:4][1].fill_(0.25),
    "transpose": lambda p: p.t().mul_(0.5),
    "flat": lambda p: p.view(-1).add_(1),
    "other shape": lambda p: p.view(4, 16).add_(1),
    "chunks": lambda p: [part.mul_(2) for part in p.chunk(2, dim=1)],
    "list": lambda p: torch._foreach_mul_([p], 0.75),
    "list of parts": lambda p: torch._foreach_mul_([p[:2], p[4:]], 0.75),
    "out": lambda p: torch.mul(p, 2, out=p),
    "out of others": lambda p: torch.mul(torch.ones_like(p), 0.5, out=p),
}
"""Of a square, whose transpose has its shape."""


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))).to(dtype)


def train(model: nn.Module, optimizer: AdamW, act: Act) -> list[torch.Tensor]:
    """Write to weights between steps; return them all."""
    for step in range(4):
        dtype = next(model.parameters()).dtype
        model(torch.ones(2, 8, dtype=dtype) * step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for layer in model:
                act(layer[0].weight)
    weights = weights_of(model)
    optimizer.close()
    return weights


@crossed(write=tuple(WRITES), plan=PLANS, dtype=(torch.float32, torch.bfloat16))
def test_what_is_written_to_a_part_is_in_the_parameter(
    tmp_path: Path, plan: Plan, write: str, dtype: torch.dtype
) -> None:
    alone = layers(dtype)
    expected = train(alone, MAKE(list(alone.named_parameters())), WRITES[write])
    model, optimizer = stow(layers(dtype), STOWED, plan=plan, compute_dtype=dtype, dir=tmp_path)
    for ours, theirs in zip(train(model, optimizer, WRITES[write]), expected, strict=True):
        assert torch.equal(ours, theirs)


def uneven() -> nn.Module:
    """Return layers whose rows two ranks do not divide evenly."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 8)) for _ in range(3)))


def loss(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    return model(torch.full((2, 8), float(rank + batch))).square().mean()


def fresh(plan: Plan) -> float:
    """Make zeros of the parameters' shapes, and write to them; return what was in them."""
    both = Twins(uneven, loss, plan)
    both.train(range(1))
    found = 0.0
    with torch.no_grad():
        for parameter in both.stowed.parameters():
            for mine in (parameter, parameter.to_local()):
                zeros = mine.new_zeros(mine.shape)
                found += float((zeros if zeros is mine else zeros.abs()).sum())
                zeros.add_(1)
    both.train(range(1, 2))
    both.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.parameters)
def test_new_zeros_are_zeros_and_nobody_s_weight(ranks: Pool, plan: Plan, world: int) -> None:
    assert ranks(world).run(fresh, plan) == [0.0] * world


def own_rows(plan: Plan) -> None:
    """Write to a part of every rank's own rows."""
    both = Twins(uneven, loss, plan)
    both.train(range(1))
    with torch.no_grad():
        for ours, theirs in zip(both.stowed.parameters(), both.alone.parameters(), strict=True):
            ours.to_local()[1:].mul_(0.5)
            start = 0
            for rank in range(both.world):
                length = -(-len(theirs) // both.world)
                stop = min(start + length, len(theirs))
                theirs[start + 1 : stop].mul_(0.5)
                start = stop
                del rank
    both.train(range(1, 2))
    both.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.parameters)
def test_ranks_may_write_to_their_own_rows(ranks: Pool, plan: Plan, world: int) -> None:
    ranks(world).run(own_rows, plan)


def test_elements_are_read_as_those_of_any_tensor(tmp_path: Path) -> None:
    plan = PLANS[1]
    model, optimizer = stow(layers(), STOWED, plan=plan, dir=tmp_path)
    expected = layers()[1][0].weight.detach()
    found = model[1][0].weight.full_tensor().detach()
    assert found.tolist() == expected.tolist()
    assert (found.numpy() == expected.numpy()).all()
    assert found[2].tolist() == expected[2].tolist()
    saved = io.BytesIO()
    torch.save(found, saved)
    saved.seek(0)
    loaded = torch.load(saved)
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, expected)
    optimizer.close()
