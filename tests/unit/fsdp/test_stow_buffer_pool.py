"""Parameters on disk hold at most weight_ram_budget of memory, whatever a run does with them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorstow
from parity.cover import crossed
from ranks.pool import Pool
from ranks.stowed import finish, groups_of
from tensorstow import PipelinePolicy, Plan
from tensorstow.fsdp.report import ParameterBytes, parameter_bytes

WIDTH = 64
BLOCKS = 8
UNIT = 4 * (WIDTH * WIDTH + WIDTH + 2 * 1000)
BUFFER = -(-UNIT // 4096) * 4096
HEAD = -(-4 * 128 * (WIDTH + 1) // 4096) * 4096
ROOM = HEAD + 2 * BUFFER + 3 * 4096
"""The least that is taken: the three largest units."""
MICRO_BATCHES = 2
EVERYTHING = Plan(
    parameters="disk",
    states="disk",
    prefetch=1,
    weight_ram_budget=ROOM,
    accumulation_steps=MICRO_BATCHES,
)


class Block(nn.Module):
    """A block with a parameter that gets no gradient, and one that gets its gradient early."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Parameter(torch.ones(10, 100))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(1000))

    def forward(self, x: torch.Tensor, *, early: bool) -> torch.Tensor:
        gain = self.early.mean() if early else 1.0
        return x + gain * torch.tanh(self.linear(x))


class Model(nn.Module):
    """Blocks, of which the first is frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.blocks[0].requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTH, 128)  # larger than a block, and there while one is used

    def forward(self, x: torch.Tensor, *, early: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, early=early)
        return self.head(x)


def _made(dtype: torch.dtype, seed: int) -> Model:
    torch.manual_seed(seed)
    return Model().to(dtype)


Run = tuple[list[torch.Tensor], ParameterBytes]


def _train(
    plan: Plan,
    dtype: torch.dtype,
    until: int,
    *,
    seed: int = 3,
    act: Callable[[tensorstow.AdamW], object] = lambda _: None,
    chunk_elements: int = 1024,
    **options: Any,  # noqa: ANN401
) -> Run:
    """Train from where the directory is to ``until``, call ``act``, return what it came to."""
    make = partial(groups_of, policy=PipelinePolicy(chunk_elements=chunk_elements), **options)
    plan = plan.but(accumulation_steps=MICRO_BATCHES)
    model, optimizer = tensorstow.stow(
        _made(dtype, seed), make, plan=plan, compute_dtype=torch.float32
    )
    start = optimizer.resume() or 0 if "dir" in options else 0
    for step in range(start, until):
        for micro in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(10 * step + micro)
            x = torch.randn(4, WIDTH, generator=generator)
            model(x, early=micro == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    act(optimizer)
    optimizer.synchronize()
    found = parameter_bytes(model)
    return finish(model, optimizer), found


def _same(a: Run, b: Run) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("states", ["disk", "host"])
def test_steps_hold_no_more_than_weight_ram_budget(overlap: str, states: str) -> None:
    plan = EVERYTHING.but(overlap=overlap, states=states)
    want = _train(Plan(), torch.float32, 3)
    got = _train(plan, torch.float32, 3)
    assert _same(got, want)
    assert got[1].disk_bytes > 2 * ROOM
    assert got[1].most_buffer_pool_bytes <= ROOM


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commits_and_resuming_hold_no_more_than_weight_ram_budget(
    tmp_path: Path, overlap: str, dtype: torch.dtype
) -> None:
    plan = EVERYTHING.but(overlap=overlap)
    room = ROOM if dtype == torch.float32 else HEAD // 2 + BUFFER + 5 * 4096
    plan = plan.but(weight_ram_budget=room)
    options = {"dir": tmp_path / "run", "commit_every": 2}
    want = _train(Plan(states="disk"), dtype, 5)
    # Two steps, of which the last commits, and one that is committed by hand.
    first = _train(plan, dtype, 3, act=lambda optimizer: optimizer.commit(), **options)
    second = _train(plan, dtype, 5, seed=4, **options)  # the frozen block is another at first
    assert _same(second, want)
    for _, found in (first, second):
        assert found.disk_bytes > room
        assert found.most_buffer_pool_bytes <= room


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_chunks_that_a_resumed_run_cut_over_units_have_these_units_and_one_more(
    tmp_path: Path, overlap: str
) -> None:
    """A run that begins with parameters in host memory, and goes on with them on disk."""
    widest: list[int] = []

    def measure(optimizer: tensorstow.AdamW) -> None:
        kept = optimizer._params()
        for chunk in kept.store.chunks:
            pagers = {m.pager for n in chunk.owners if (m := kept.all()[n]).pager is not None}
            widest.append(sum(pager.nbytes for pager in pagers))

    options = {"dir": tmp_path / "run", "commit_every": 1, "chunk_elements": 4096}
    want = _train(Plan(states="disk"), torch.float32, 3, chunk_elements=4096)
    _train(Plan(states="disk"), torch.float32, 2, **options)
    got = _train(EVERYTHING.but(overlap=overlap), torch.float32, 3, act=measure, **options)
    assert _same(got, want)
    assert max(widest) > 2 * BUFFER
    assert got[1].most_buffer_pool_bytes <= max(ROOM, max(widest) + HEAD + BUFFER)


class Sides(nn.Module):
    """Blocks, each with a side way of which nothing is used: FSDP2 gathers it for backward too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.sides = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for way, side in zip(self.ways, self.sides, strict=True):
            x = torch.tanh(way(x))
            side(x)
        return x


class Encoders(nn.Module):
    """Blocks whose inputs are data, which need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tanh(block(x)) for block in self.blocks]).sum(0)


def held_by(make: type[nn.Module], overlap: str) -> tuple[int, int]:
    """Return the most that was pinned, and what may be."""
    model = make()
    room = 3 * (4 * WIDTH * WIDTH // dist.get_world_size() + 2 * 4096)
    plan = Plan(
        parameters="disk", states="disk", overlap=overlap, prefetch=1, weight_ram_budget=room
    )
    units = [module for module in model.modules() if isinstance(module, nn.Linear)]
    model, optimizer = tensorstow.stow(model, groups_of, plan=plan, units=units)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = parameter_bytes(model).most_buffer_pool_bytes
    optimizer.close()
    return found, room


@crossed(overlap=("none", "forward", "backward"), world=(1, 2), make=(Sides, Encoders))
def test_what_is_gathered_and_not_used_is_not_held(
    ranks: Pool, make: type[nn.Module], world: int, overlap: str
) -> None:
    for held, room in ranks(world).run(held_by, make, overlap):
        assert held <= room


def test_a_commit_by_hand_reads_each_unit_once_and_writes_none(tmp_path: Path) -> None:
    moved: list[tuple[int, int]] = []

    def commit(optimizer: tensorstow.AdamW) -> None:
        model = optimizer._runtime.commits.module
        assert model is not None
        optimizer.wait()  # for updates, which read and write units too
        before = parameter_bytes(model)
        optimizer.commit()
        after = parameter_bytes(model)
        read = after.bytes_read - before.bytes_read
        moved.append((read, after.bytes_written - before.bytes_written))

    _train(EVERYTHING, torch.float32, 1, act=commit, dir=tmp_path, commit_every=None)
    assert moved[0][0] <= BLOCKS * BUFFER + HEAD
    assert moved[0][1] == 0
