"""Whole weights on every rank, of which each updates its rows: plain parameters below stage 3."""

import copy
import io
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ranks.pool import Pool
from ranks.stowed import WIDTH, loss_of, model_of, twins
from ranks.twin import ADAMW, Twins
from tensorstow import AdamW, Plan, _native, stow
from tensorstow.base.errors import OptionError
from tensorstow.base.update_on import Overlap
from tensorstow.tensors.dtensor import gradient_of
from tensorstow.tensors.shares import share_of


def on_one_rank(plan: Plan) -> None:
    """Do on the first rank alone what needs whole, plain parameters there."""
    both = twins(plan)
    both.train()
    assert {type(p) for p in both.alone.parameters()} == {nn.Parameter}
    if dist.get_rank() == 0:
        with torch.no_grad():
            seen = [loss_of(model, 0, 9) for model in (both.stowed, both.alone)]
        assert torch.equal(*seen)
        stream = io.BytesIO()
        torch.save(both.stowed.state_dict(), stream)
        stream.seek(0)
        saved = torch.load(stream, weights_only=True)
        assert {type(value) for value in saved.values()} == {torch.Tensor}
        fresh = model_of(torch.float32)
        fresh.load_state_dict(saved)
        for mine, theirs in zip(fresh.parameters(), both.alone.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        copied = copy.deepcopy(both.stowed)
        loss_of(copied, 0, 9).backward()  # by itself: no rank reduces its gradients
        assert {type(p.grad) for p in copied.parameters()} == {torch.Tensor}
        with torch.no_grad():
            for mean, weight in zip(fresh.parameters(), both.stowed.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
                assert weight.detach().numpy().shape == weight.shape
    both.train(range(3, 5))
    both.compare()
    both.close()


@pytest.mark.parametrize(
    "plan",
    [Plan(stage=0), Plan(stage=1, overlap="forward"), Plan(stage=2)],
    ids=lambda p: f"z{p.stage}-{p.overlap}",
)
def test_one_rank_alone_reads_copies_and_saves(ranks: Pool, plan: Plan) -> None:
    ranks(2).run(on_one_rank, plan)


def copied_between_micro_batches() -> None:
    """Take a step of two micro-batches: a forward of a copy between them is none."""
    plan = Plan(stage=1, accumulation_steps=2)
    model, optimizer = stow(model_of(torch.float32), ADAMW, plan=plan)
    loss_of(model, dist.get_rank(), 0).backward()
    loss_of(copy.deepcopy(model), dist.get_rank(), 9).backward()
    loss_of(model, dist.get_rank(), 1).backward()
    assert {type(p.grad) for p in model.parameters()} == {DTensor}
    optimizer.step()
    optimizer.close()


def where_one_rank_is_late(plan: Plan) -> None:
    """Let the second rank come later to backward and to the step, and updates take their time."""
    both = twins(plan)

    def come_late(*_: object) -> None:
        time.sleep(0.05 * dist.get_rank())

    both.stowed.register_forward_hook(come_late)
    both.ours.register_step_pre_hook(come_late)
    _native.slow_down(update_elements_per_s=2e4)
    try:
        both.train()
    finally:
        _native.slow_down()
    both.compare()
    both.close()


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_other_ranks_and_updates_are_waited_for(ranks: Pool, overlap: Overlap) -> None:
    ranks(2).run(where_one_rank_is_late, Plan(stage=2, overlap=overlap))


class Odd(nn.Module):
    """Has a scalar, a parameter with fewer rows than ranks, one nobody uses, and a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.row = nn.Parameter(torch.ones(1, 3))
        self.unused = nn.Parameter(torch.ones(4))
        self.on_one = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        order = self.blocks if rank == 0 else list(reversed(self.blocks))
        for block in order:
            x = block(x)
        if rank == 1:
            x = x + self.on_one
        return x * self.scale * self.row


def odd() -> Odd:
    torch.manual_seed(5)
    return Odd()


def loss_of_odd(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + batch)
    found: torch.Tensor = model(torch.randn(2, 3, generator=generator), rank)
    return found.square().sum()


def train_odd(stage: int) -> None:
    """Train what ranks use differently: the bits are those of one process."""
    model, optimizer = stow(odd(), partial(ADAMW), plan=Plan(stage=stage))
    alone = odd()
    theirs = ADAMW(list(alone.named_parameters()))
    for batch in range(3):
        loss_of_odd(model, dist.get_rank(), batch).backward()
        assert model.unused.grad is None
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        found: list[list[torch.Tensor | None]] = []
        for rank in range(2):
            loss_of_odd(alone, rank, batch).backward()
            found.append([p.grad for p in alone.parameters()])
            for parameter in alone.parameters():
                parameter.grad = None
        for parameter, a, b in zip(alone.parameters(), *found, strict=True):
            given = [g for g in (a, b) if g is not None]
            parameter.grad = torch.stack(given).sum(0) / 2 if given else None
        theirs.clip_grad_norm_(0.5)
        theirs.step()
        theirs.zero_grad()
    for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    assert model.unused not in optimizer.state
    optimizer.close()
    theirs.close()


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_may_use_other_parameters_in_another_order(ranks: Pool, stage: int) -> None:
    ranks(2).run(train_odd, stage)


def states_by_checkpoint() -> None:
    """Take the states by torch's own functions, and go on from them in another optimizer."""
    both = twins(Plan(stage=2))
    both.train()
    states: dict[str, Any] = get_optimizer_state_dict(both.stowed, both.ours)
    values = [v for e in states["state"].values() for k, v in e.items() if k != "step"]
    assert {type(v) for v in values} == {DTensor}
    name, parameter = next(iter(both.stowed.named_parameters()))
    share = share_of(parameter)
    assert share is not None
    own = states["state"][name]["exp_avg"].to_local()
    assert own.shape == share.rows(parameter).shape
    model, optimizer = stow(copy.deepcopy(both.stowed), ADAMW, plan=Plan(stage=1))
    set_optimizer_state_dict(model, optimizer, states)
    loss_of(model, both.rank, 7).backward()
    optimizer.step()
    both.train(range(7, 8))
    for mine, wanted in zip(model.parameters(), both.stowed.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    optimizer.close()
    both.close()


class Failing(nn.Module):
    """Fails in backward where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        x = self.blocks[0](x)
        if fails:
            x.register_hook(lambda _: 1 / 0)
        out: torch.Tensor = self.blocks[1](x)
        return out


def fail_in_backward() -> None:
    """Let a backward fail behind its first reduction; a step by half its gradients is refused."""
    torch.manual_seed(5)
    model, optimizer = stow(Failing(), ADAMW, plan=Plan(stage=2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2), fails=True).sum().backward()
    with pytest.raises(OptionError, match="backward that did not end"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2), fails=True).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.close()


def wait_unreduced() -> None:
    """Refuse a step while gradients wait to be reduced, which sum up until they are."""
    model, optimizer = stow(nn.Linear(2, 2), ADAMW, plan=Plan(stage=0))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    assert type(model.weight.grad) is torch.Tensor
    assert gradient_of(model.weight) is None
    with pytest.raises(OptionError, match="not reduced over the ranks yet"):
        optimizer.step()
    model.set_requires_gradient_sync(True)
    model(3 * torch.ones(1, 2)).sum().backward()
    assert isinstance(model.weight.grad, DTensor)
    assert model.weight.grad.to_local().unique().tolist() == [4.0]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert isinstance(model.weight.grad, DTensor)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()  # zeros of the step before are no gradients
    model.weight.grad = 2 * model.weight.grad  # as unreduced as it was
    model.set_requires_gradient_sync(True)
    model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    assert model.weight.grad.to_local().unique().tolist() == [2.5]
    model.set_requires_gradient_sync(False)
    with pytest.raises(OptionError, match="came after one of the same step"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.close()


def in_bf16() -> list[float]:
    """Return the reduced sum of two micro-batches, which bf16 would round."""
    net = nn.Linear(1, 2, bias=False).bfloat16()
    model, optimizer = stow(net, partial(AdamW, lr=0.0), plan=Plan(stage=1, accumulation_steps=2))
    for gradient in (1.0, 2.0**-9):
        model(torch.full((1, 1), gradient, dtype=torch.bfloat16)).sum().backward()
    reduced: Any = model.weight.grad
    optimizer.close()
    values: list[float] = reduced.full_tensor().flatten().tolist()
    return values


def test_a_sum_of_micro_batches_is_not_rounded_to_bf16(ranks: Pool) -> None:
    for values in ranks(2).run(in_bf16):
        assert values == [1.0 + 2.0**-9] * 2


def in_fp16() -> list[float]:
    """Return the mean of gradients whose sum is beyond fp16."""
    model, optimizer = stow(
        nn.Linear(1, 1, bias=False).half(), partial(AdamW, lr=0.0), plan=Plan(stage=2)
    )
    model(torch.full((1, 1), 40000.0, dtype=torch.float16)).backward()
    gradient: Any = model.weight.grad
    optimizer.close()
    values: list[float] = gradient.full_tensor().flatten().tolist()
    return values


def test_a_sum_beyond_fp16_is_divided_before(ranks: Pool) -> None:
    for values in ranks(2).run(in_fp16):
        assert math.isfinite(values[0])
        assert values == [torch.tensor(40000.0, dtype=torch.float16).item()]


def unfreeze() -> None:
    """Train a unit that was frozen at first: it is reduced and gathered from then on."""
    both = twins(Plan(stage=2))
    for model in (both.stowed, both.alone):
        model.blocks[1].requires_grad_(requires_grad=False)
    both.train()
    for model in (both.stowed, both.alone):
        model.blocks[1].requires_grad_(requires_grad=True)
    both.train(range(3, 5))
    both.compare()
    assert both.stowed.blocks[1].up.weight in both.ours.state
    both.close()


def of_part(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    """Return a loss that the forward of the model itself has no part in."""
    part: Any = model.blocks
    found: torch.Tensor = part[1](torch.full((2, WIDTH), float(1 + rank + batch)))
    return found.square().sum()


def part_frozen() -> nn.Module:
    model = model_of(torch.float32)
    model.blocks[1].requires_grad_(requires_grad=False)
    return model


def unfreeze_part() -> None:
    """Reduce what is unfrozen without a forward of the whole."""
    both = Twins(part_frozen, of_part, Plan(stage=2))
    for model in (both.stowed, both.alone):
        model.get_submodule("blocks.1").requires_grad_(requires_grad=True)
    both.backward(0)
    both.compare_gradients()
    both.step()
    both.close()


class Again(nn.Module):
    """Comes to its blocks again, in backwards that reentrant checkpoints run inside of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        for parameter in self.parameters():
            nn.init.constant_(parameter, 2.0)  # sums are exact in any order

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        if rank == 0:
            x = checkpoint(self.blocks[1], x, use_reentrant=True)
        out: torch.Tensor = self.blocks[1](x)  # its gradients come first, and are under way
        return out


def loss_of_again(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    found: torch.Tensor = model(torch.full((1, 2), 1.0 + batch, requires_grad=True), rank)
    return found.sum()


def go_through_again(stage: int) -> None:
    both = Twins(Again, loss_of_again, Plan(stage=stage))
    for batch in range(2):
        both.backward(batch)
        both.compare_gradients()
    both.step()
    both.close()


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_that_come_when_others_are_under_way_count(ranks: Pool, stage: int) -> None:
    ranks(2).run(go_through_again, stage)


def ask_for_gradients() -> None:
    """Call torch.autograd.grad between backward and step: gradients stay in place."""
    both = twins(Plan(stage=2))
    both.backward(0)
    given = torch.autograd.grad(loss_of(both.stowed, both.rank, 1), list(both.stowed.parameters()))
    assert {type(gradient) for gradient in given} == {torch.Tensor}
    both.compare_gradients()
    both.step()
    both.close()


def kinds() -> list[bool]:
    """Return, by plan, whether weights are plain and whole."""
    found = []
    for plan in (Plan(stage=2), Plan(stage=3), Plan(stage=2, overlap="backward")):
        model, optimizer = stow(nn.Linear(2, 2), ADAMW, plan=plan)
        found.append(share_of(model.weight) is not None)
        assert found[-1] != isinstance(model.weight, DTensor)
        optimizer.close()
    return found


def test_fsdp2_keeps_stage_3_and_updates_beside_backward(ranks: Pool) -> None:
    assert ranks(2).run(kinds) == [[True, False, False]] * 2


def place_again() -> None:
    """Give stow() a model that it has placed, and one whose parameter has a hook."""
    model, optimizer = stow(nn.Linear(2, 2), ADAMW, plan=Plan(stage=2))
    with pytest.raises(OptionError, match="was placed before"):
        stow(model, ADAMW, plan=Plan(stage=2))
    optimizer.close()
    hooked: Any = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(OptionError, match="weight has a hook"):
        stow(hooked, ADAMW, plan=Plan(stage=2))


TASKS = [
    copied_between_micro_batches,
    states_by_checkpoint,
    fail_in_backward,
    wait_unreduced,
    unfreeze,
    unfreeze_part,
    ask_for_gradients,
    place_again,
]


@pytest.mark.parametrize("task", TASKS)
def test_two_ranks_with_whole_weights(ranks: Pool, task: Callable[[], None]) -> None:
    ranks(2).run(task)
