"""Kinds of parameters and of models: frozen, thawed, unused, shared, short, and what is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import tensorstow
from ranks.pool import Pool
from ranks.twin import ADAMW, FETCHED, FETCHED_BESIDE, Twins, mesh_here
from tensorstow import Plan
from tensorstow.base.errors import OptionError

PLANS = [
    Plan(),
    Plan(overlap="forward"),
    Plan(overlap="backward", states="disk"),
    Plan(stage=1),
    Plan(stage=2),
    FETCHED,
    FETCHED_BESIDE,
]
SIZE = 6


class Layers(nn.Module):
    """Blocks that may be left out, or run again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.head = nn.Linear(SIZE, 1)
        self.gain = nn.Parameter(torch.ones(1))  # fewer rows than two ranks

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.blocks[number](x))
        return self.head(x) * self.gain


def seen(rank: int, batch: int) -> torch.Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(100 * rank + batch))


def loss(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    return model(seen(rank, batch)).square().mean()


def half_frozen() -> Layers:
    """Freeze a unit, and a part of another."""
    model = Layers()
    model.blocks[0].requires_grad_(requires_grad=False)
    model.blocks[1].bias.requires_grad_(requires_grad=False)
    return model


def thawed(plan: Plan) -> tuple[int, int, int, int]:
    """Train with frozen parameters, then with none; return states' numbers and bytes of both."""
    both = Twins(half_frozen, loss, plan)
    both.train(range(2))
    few, little = len(both.ours.state), both.ours._memory().logical_bytes
    frozen = [p for p in both.stowed.parameters() if not p.requires_grad]
    assert len(frozen) == 3
    assert not any(p in both.ours.state for p in frozen)
    both.each(lambda model, _: model.requires_grad_(requires_grad=True))
    both.train(range(2, 4))
    more, much = len(both.ours.state), both.ours._memory().logical_bytes
    both.close()
    return few, more, little, much


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"z{p.stage}-{p.overlap}-{p.parameters}")
def test_frozen_parameters_have_no_states_until_they_are_trained(
    ranks: Pool, plan: Plan, world: int
) -> None:
    found = ranks(world).run(thawed, plan)
    assert [f[:2] for f in found] == [(6, 9)] * world
    assert sum(f[2] for f in found) == 8 * (SIZE * SIZE + SIZE * SIZE + SIZE + SIZE + 1 + 1)
    assert sum(f[3] for f in found) == 8 * (3 * (SIZE * SIZE + SIZE) + SIZE + 1 + 1)


def thawed_in_16_bits() -> list[torch.dtype]:
    """Train a unit that was all frozen at first, in another dtype than its masters'."""
    model, optimizer = tensorstow.stow(
        half_frozen(), ADAMW, plan=Plan(), mesh=mesh_here(), compute_dtype=torch.bfloat16
    )
    for step in range(3):
        loss(model, 0, step).float().backward()
        dtypes = [p.grad.dtype for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(requires_grad=True)
    optimizer.close()
    return dtypes


@pytest.mark.parametrize("world", [1, 2])
def test_a_frozen_unit_may_be_trained_later_in_another_dtype(ranks: Pool, world: int) -> None:
    for dtypes in ranks(world).run(thawed_in_16_bits):
        assert dtypes == [torch.float32] * 9


def summed_once_thawed() -> set[torch.dtype]:
    """Return the dtypes of sums over two micro-batches, of what was frozen before."""
    both = Twins(lambda: half_frozen().bfloat16(), loss_in_16_bits)
    both.train(range(1))
    both.each(lambda model, _: model.requires_grad_(requires_grad=True))
    for batch in (1, 2):
        both.backward(batch)
    both.compare_gradients()
    dtypes = {p.grad.dtype for p in both.stowed.parameters()}
    both.step()
    both.close()
    return dtypes


def loss_in_16_bits(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    return model(seen(rank, batch).bfloat16()).float().square().mean()


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_of_thawed_parameters_are_summed_as_others_are(ranks: Pool, world: int) -> None:
    assert ranks(world).run(summed_once_thawed) == [{torch.float32}] * world


def in_order(plan: Plan, orders: list[tuple[int, ...]]) -> None:
    """Run blocks in another order in every step."""

    def ordered(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
        return model(seen(rank, batch), orders[batch]).square().mean()

    both = Twins(Layers, ordered, plan)
    both.train(range(len(orders)))
    both.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"z{p.stage}-{p.overlap}-{p.parameters}")
@pytest.mark.parametrize(
    "orders",
    [[(0, 1), (1, 2), (2, 0), (0, 1, 2)], [(0, 1, 2, 0), (1, 1, 2, 2), (0, 1, 0, 1)]],
    ids=["a branch not taken", "called twice"],
)
def test_blocks_may_be_left_out_or_run_twice(
    ranks: Pool, plan: Plan, orders: list[tuple[int, ...]], world: int
) -> None:
    ranks(world).run(in_order, plan, orders)


class Named(nn.Module):
    """Blocks that cannot be called: their parts are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(SIZE), "linear": nn.Linear(SIZE, SIZE)})
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block["linear"](block["norm"](x)))
        return x


def in_parts(plan: Plan) -> None:
    """Train blocks whose parts are called."""
    both = Twins(Named, loss, plan)
    both.train()
    both.compare()
    both.close()


@pytest.mark.parametrize("plan", [Plan(overlap="forward"), FETCHED], ids=lambda p: p.parameters)
def test_blocks_may_be_dicts_of_modules(ranks: Pool, plan: Plan) -> None:
    ranks(2).run(in_parts, plan)


def refused(make: Callable[[], nn.Module]) -> tuple[str, bool]:
    """Return the message, and whether all parameters are what they were."""
    model = make()
    before = list(model.parameters())
    try:
        tensorstow.stow(model, ADAMW, plan=Plan(), mesh=mesh_here())
    except OptionError as error:
        return str(error), all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return "not refused", False


class Scaled(Layers):
    """Has scalars: in blocks, at the root, one that rank 0 alone uses, a frozen and an idle one."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.25))
        self.sometimes, self.idle, self.frozen = (nn.Parameter(torch.tensor(0.5)) for _ in range(3))
        self.frozen.requires_grad_(requires_grad=False)
        for number, block in enumerate(self.blocks):
            block.scale = nn.Parameter(torch.tensor(1.0 + number))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        is_of_rank_0 = torch.equal(x, seen(0, 0)) or torch.equal(x, seen(0, 1))
        for number in order:
            block = self.blocks[number]
            x = torch.tanh(block(x) * block.scale)
        x = self.head(x) * self.gain * self.temperature * self.frozen
        return x * self.sometimes if is_of_rank_0 else x


SCALARS = [
    Plan(states="disk"),
    Plan(overlap="forward"),
    FETCHED,
    FETCHED_BESIDE,
    Plan(stage=2),
]


def with_scalars(plan: Plan) -> None:
    """Train with micro-batches, and clip."""
    both = Twins(Scaled, loss, plan)
    for step in range(2):
        both.backward(0)
        both.backward(1)
        both.compare_gradients()
        norms = both.each(lambda _, optimizer: optimizer.clip_grad_norm_(0.05))
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-12)
        both.step()
        both.stowed.set_requires_gradient_sync(step == 0)
        both.stowed.set_requires_gradient_sync(True)
    assert not isinstance(both.stowed.temperature, DTensor)
    assert both.stowed.blocks[1].scale.item() != 2.0
    assert both.stowed.idle not in both.ours.state or not both.ours.state[both.stowed.idle]["step"]
    both.close()


@pytest.mark.parametrize(
    ("plan", "world"),
    [*((plan, 2) for plan in SCALARS), (FETCHED, 1)],
    ids=["z3", "forward", "fetched", "fetched-beside", "z2", "fetched-alone"],
)
def test_scalars_stay_plain_and_every_rank_updates_them_alike(
    ranks: Pool, plan: Plan, world: int
) -> None:
    ranks(world).run(with_scalars, plan)


def resumed_with_scalars(folder: str) -> None:
    """Commit, train on, and go back: the scalars too."""
    make = partial(tensorstow.AdamW, lr=0.1)
    model, optimizer = tensorstow.stow(Scaled(), make, plan=Plan(), dir=folder, mesh=mesh_here())
    rank = dist.get_rank()
    kept = []
    for step in range(2):
        loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append([p.item() for p in model.parameters() if not p.ndim])
        if step == 0:
            optimizer.commit()
    assert optimizer.resume() == 1
    assert [p.item() for p in model.parameters() if not p.ndim] == kept[0] != kept[1]
    loss(model, rank, 1).backward()
    optimizer.step()
    assert [p.item() for p in model.parameters() if not p.ndim] == kept[1]
    optimizer.close()


def test_scalars_are_committed(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(resumed_with_scalars, str(tmp_path))


def with_scalar() -> nn.Module:
    model = Layers()
    model.temperature = nn.Parameter(torch.ones(()))
    return model


def with_scalar_elsewhere() -> nn.Module:
    return with_scalar().to("meta")


def with_nothing() -> nn.Module:
    model = Layers()
    model.unused = nn.Parameter(torch.ones(0, 3))
    return model


def mixed() -> nn.Module:
    model = Layers()
    model.blocks[1].weight.data = model.blocks[1].weight.data.bfloat16()
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_scalar_elsewhere, ["temperature is a scalar", "(1,)"]),
        (with_nothing, ["unused has no elements", "leave the parameter out"]),
        (mixed, ["'blocks.1'", "blocks.1.weight is torch.bfloat16", "compute_dtype="]),
    ],
)
def test_what_fsdp2_cannot_shard_is_refused_by_name_before_anything_is_placed(
    ranks: Pool, make: Callable[[], nn.Module], words: list[str]
) -> None:
    ((message, untouched),) = ranks(1).run(refused, make)
    assert all(word in message for word in words), message
    assert untouched


def test_a_model_that_stays_whole_may_have_them_all() -> None:
    for make in (with_scalar, with_nothing):
        model, optimizer = tensorstow.stow(make(), ADAMW, plan=Plan())
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        assert all(p in optimizer.state for p in model.parameters())
        optimizer.close()


def frozen_and_mixed(plan: Plan) -> None:
    """Train fp32 beside what is frozen in bf16, in the same unit."""

    def make() -> nn.Module:
        model = Layers()
        for block in model.blocks:
            block.frozen = nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16), requires_grad=False)
        return model

    both = Twins(make, loss, plan)
    both.train()
    both.close()


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_parameters_may_have_another_dtype(ranks: Pool, world: int) -> None:
    ranks(world).run(frozen_and_mixed, Plan())
