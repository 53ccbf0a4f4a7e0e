"""Tiled layers against ``nn.Linear``, and how much of one is in memory at a time."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
from compare import all_equal, same_products
from tensorstow import PipelinePolicy, Plan, usage
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.deepspeed.runtime.zero import tiling
from tensorstow.deepspeed.zero import Init
from tensorstow.deepspeed.zero import TiledLinear as DeepSpeeds
from tensorstow.fsdp.units import units_of
from tensorstow.nn import TiledLinear
from tensorstow.planner.sizes import Sizes, bytes_around, least_in_memory

SPLITS = [(1, 1), (1, 4), (2, 2), (5, 3), (23, 2)]
"""Of inputs, and of outputs."""


def layers(
    in_splits: int, out_splits: int, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, TiledLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(23, 29, bias=bias, dtype=dtype)
    tiled = TiledLinear(23, 29, bias, in_splits, out_splits, init_linear=plain, dtype=dtype)
    return plain, tiled


def test_deepspeeds_paths_have_the_same_class() -> None:
    assert DeepSpeeds is tiling.TiledLinear is TiledLinear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", SPLITS)
def test_tiles_are_parts_of_the_matrix(splits: tuple[int, int], *, bias: bool) -> None:
    plain, tiled = layers(*splits, bias=bias)
    assert (len(tiled.in_parts), len(tiled.out_parts)) == (splits[0] + 1, splits[1] + 1)
    for i, row in enumerate(tiled.linears):
        top, bottom = tiled.out_parts[i : i + 2]
        for j, tile in enumerate(row):
            left, right = tiled.in_parts[j : j + 2]
            assert torch.equal(tile.weight, plain.weight[top:bottom, left:right])
            if bias and j == splits[0] - 1:
                assert torch.equal(tile.bias, plain.bias[top:bottom])
            else:
                assert tile.bias is None
    assert next(iter(tiled.state_dict())) == "linears.0.0.weight"
    sizes = {b - a for a, b in zip(tiled.in_parts, tiled.in_parts[1:], strict=False)}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", SPLITS)
def test_outputs_and_gradients(splits: tuple[int, int], dtype: torch.dtype) -> None:
    """Which term of a sum is added first is a library's choice, and rounding bounds the rest."""
    plain, tiled = layers(*splits, dtype=dtype)
    x, y = (torch.randn(3, 5, 23, dtype=dtype).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    wanted, found = plain(x), tiled(y)
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    found.backward(gradient)
    sizes = [t.detach().double().abs() for t in (x, plain.weight, plain.bias, gradient)]
    given, weight, bias, slope = sizes
    assert same_products(found, wanted, given @ weight.T + bias, 23 + 1, splits[0])
    assert same_products(y.grad, x.grad, slope @ weight, 29, splits[1])
    whole = torch.cat([torch.cat([t.weight.grad for t in row], 1) for row in tiled.linears])
    assert same_products(whole, plain.weight.grad, slope.flatten(0, 1).T @ given.flatten(0, 1), 15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_each_cut_of_outputs_has_the_bits_of_a_layer_of_its_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, dtype=dtype)
    tiled = TiledLinear(64, 96, out_splits=3, init_linear=plain, dtype=dtype)
    rows = [slice(a, b) for a, b in pairwise(tiled.out_parts)]
    layers = nn.ModuleList(nn.Linear(64, r.stop - r.start, dtype=dtype) for r in rows)
    for r, layer in zip(rows, layers, strict=True):
        layer.load_state_dict({"weight": plain.weight[r], "bias": plain.bias[r]})
    x, y = (torch.ones(16, 64, dtype=dtype).mul(0.3).cumsum(1).requires_grad_() for _ in range(2))
    wanted, found = torch.cat([layer(x) for layer in layers], -1), tiled(y)
    assert torch.equal(found, wanted)
    wanted.square().sum().backward()
    found.square().sum().backward()
    assert torch.equal(y.grad, x.grad)
    assert all_equal((p.grad for p in tiled.parameters()), (p.grad for p in layers.parameters()))


def test_split_inputs_and_outputs() -> None:
    _, tiled = layers(2, 3)
    x = torch.randn(4, 23)
    whole = tiled(x)
    tiled.input_is_already_split = True
    parts = list(x.split([12, 11], dim=-1))
    assert torch.equal(tiled(parts), whole)
    tiled.combine_out_splits = False
    outputs = tiled(parts)
    assert isinstance(outputs, list)
    assert [o.shape[-1] for o in outputs] == [10, 10, 9]
    assert torch.equal(torch.cat(outputs, -1), whole)
    with pytest.raises(OptionError, match="got 1 parts"):
        tiled(parts[:1])
    with pytest.raises(OptionError, match="was given a Tensor"):
        tiled(x)
    tiled.input_is_already_split = False
    with pytest.raises(OptionError, match="was given a list"):
        tiled(parts)


def test_tiles_are_of_the_class_that_is_given() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    plain, _ = layers(1, 1)
    tiled = TiledLinear(23, 29, in_splits=2, out_splits=2, linear_cls=Scaled, init_linear=plain)
    x = torch.randn(4, 23)
    sizes = [t.detach().double().abs() for t in (x, plain.weight, plain.bias)]
    magnitude = 2 * torch.addmm(sizes[2], sizes[0], sizes[1].T)
    assert same_products(tiled(x), 2 * plain(x), magnitude, 23 + 1, 2)


@pytest.mark.parametrize("splits", [(0, 1), (1, 0), (33, 1), (1, 33)])
def test_cuts_that_are_none_are_refused(splits: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match="_splits="):
        TiledLinear(32, 32, in_splits=splits[0], out_splits=splits[1])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: nn.Linear(23, 28), "shape"),
        (lambda: nn.Linear(23, 29, bias=False), "this layer has a bias"),
        (lambda: nn.Linear(23, 29, device="meta"), "meta device"),
    ],
)
def test_other_layers_are_refused(other: Any, message: str) -> None:  # noqa: ANN401
    _, tiled = layers(2, 2)
    before = [p.clone() for p in tiled.parameters()]
    with pytest.raises(OptionError, match=message):
        tiled.copy_params_from(other())
    assert all(torch.equal(a, b) for a, b in zip(before, tiled.parameters(), strict=True))


def test_nothing_is_copied_to_a_layer_without_memory() -> None:
    plain, _ = layers(1, 1)
    with torch.device("meta"), pytest.raises(OptionError, match="after the model is placed"):
        TiledLinear(23, 29, out_splits=2, init_linear=plain)


def test_a_layer_that_is_made_in_zero_init_has_the_values_that_it_is_given() -> None:
    plain, _ = layers(1, 1)
    with Init():
        tiled = TiledLinear(23, 29, out_splits=2, init_linear=plain)
    given = TiledLinear(23, 29, out_splits=2, init_linear=plain)
    assert all_equal(tiled.parameters(), given.parameters())
    x = torch.randn(3, 23)
    assert torch.equal(tiled(x), given(x))


# --- units ---

WIDTH, WIDE, TILES = 64, 1024, 4
TILE = 4 * WIDE // TILES * (WIDTH + 1)


class Net(nn.Module):
    """Blocks with a wide tiled layer in each, and one outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                TiledLinear(WIDTH, WIDE, out_splits=TILES),
                nn.Tanh(),
                TiledLinear(WIDE, WIDTH, in_splits=2, out_splits=2),
                nn.LayerNorm(WIDTH),
            )
            for _ in range(2)
        )
        self.head = TiledLinear(WIDTH, WIDE, out_splits=TILES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_tiles_are_units_before_their_block() -> None:
    net = Net()
    units = units_of(net)
    names = [u.name for u in units]
    first = [f"blocks.0.0.linears.{i}.0" for i in range(TILES)]
    second = [f"blocks.0.2.linears.{i}.{j}" for i in range(2) for j in range(2)]
    assert names[:9] == [*first, *second, "blocks.0"]
    assert list(units[8].parameters) == ["blocks.0.3.weight", "blocks.0.3.bias"]
    assert names[-5:] == [*(f"head.linears.{i}.0" for i in range(TILES)), ""]
    assert sum(len(u.parameters) for u in units) == len(list(net.parameters()))
    alone = [u.name for u in units_of(net, [net.blocks[1]])]
    assert alone.index("blocks.1") > max(
        alone.index(name.replace("0.", "1.", 1)) for name in second
    )


class Around(nn.Module):
    """A block whose own parameters are as large as one of its tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.tiles = TiledLinear(2 * WIDTH, 8 * WIDTH, out_splits=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.tiles(self.up(x))).unflatten(-1, (8, WIDTH)).sum(-2)


def trained(
    plan: Plan, place: Path, make_net: type[nn.Module] = Net
) -> tuple[list[torch.Tensor], int]:
    """Return losses and weights after two steps, and the most memory that parameters had."""
    torch.manual_seed(0)
    net = make_net()
    make = partial(tensorstow.AdamW, lr=1e-2, policy=PipelinePolicy(chunk_elements=1024))
    model, optimizer = tensorstow.stow(net, make, plan=plan, dir=place)
    results = []
    for step in range(2):
        x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    optimizer.synchronize()
    results += [value.clone() for value in model.state_dict().values()]
    most = usage(model).parameters.most_buffer_pool_bytes
    optimizer.close()
    return results, most


def test_tiles_on_disk_come_one_at_a_time(tmp_path: Path) -> None:
    """The pool has room for three tiles and a norm; each of the wide layers has four."""
    size = 3 * (TILE + 4096) + 4096
    plan = Plan(parameters="disk", states="disk", prefetch=1, weight_ram_budget=size)
    found, most = trained(plan, tmp_path / "disk")
    assert 0 < most <= size < TILES * TILE
    wanted, _ = trained(Plan(parameters="host", states="host"), tmp_path / "host")
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class Blocks(nn.Module):
    """Such blocks, and a root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Around() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_is_in_memory_round_its_tiles(tmp_path: Path) -> None:
    """Bounds count it beside them: the root, the block, a tile and the next."""
    sizes = Sizes.of(units_of(Blocks()), 1)
    shares = [unit.share_bytes for unit in sizes.units]
    size = least_in_memory(shares, bytes_around(sizes.units))
    assert size > least_in_memory(shares)
    plan = Plan(parameters="disk", states="disk", prefetch=1, weight_ram_budget=size)
    found, most = trained(plan, tmp_path / "disk", Blocks)
    assert least_in_memory(shares) < most <= size
    wanted, _ = trained(Plan(parameters="host", states="host"), tmp_path / "host", Blocks)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with pytest.raises(BudgetError, match="give at least that"):
        trained(plan.but(weight_ram_budget=size - 1), tmp_path / "less", Blocks)


def test_values_are_copied_to_tiles_that_are_placed(tmp_path: Path) -> None:
    plain = nn.Linear(WIDTH, WIDE)
    plan = Plan(parameters="disk", states="disk")
    model, optimizer = tensorstow.stow(
        Net(), partial(tensorstow.AdamW, lr=1e-3), plan=plan, dir=tmp_path
    )
    model.head.copy_params_from(plain)
    named = model.head.state_dict().items()
    assert torch.equal(torch.cat([v for k, v in named if "weight" in k]), plain.weight)
    assert torch.equal(torch.cat([v for k, v in named if "bias" in k]), plain.bias)
    optimizer.close()
