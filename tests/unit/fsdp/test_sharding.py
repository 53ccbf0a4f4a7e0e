"""Sharding: the ranks and their mesh, rows as FSDP2 cuts them, tied parameters that stay tied."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ranks.pool import Pool
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.sharding import (
    Sharding,
    backend_of,
    current_device,
    host_group,
    make_mesh,
    rank_here,
    replace_parameter,
    world_size,
)
from tensorstow.fsdp.units import units_of
from tensorstow.planner.sizes import UnitSizes


@dataclass
class Mesh:
    """A mesh as it looks from one rank, of (replicate, shard)."""

    rank: int
    ranks: int
    replicas: int = 2
    ndim: int = 2

    def size(self, dim: int) -> int:
        return (self.replicas, self.ranks)[dim]

    def get_local_rank(self, dim: int) -> int:
        return (1, self.rank)[dim]


def sharding_of(rank: int, ranks: int) -> Sharding:
    return Sharding(
        Mesh(rank, ranks), torch.device("cpu"), MixedPrecisionPolicy(), reshard_after_forward=True
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 21])
def test_rows_are_cut_as_torch_cuts_them(rows: int, ranks: int) -> None:
    """Also where ranks get fewer than others, or none."""
    whole = torch.arange(rows)
    pieces = list(whole.chunk(ranks))
    for rank in range(ranks):
        start, stop, length = sharding_of(rank, ranks).rows(torch.Size([rows, 3]))
        mine = pieces[rank] if rank < len(pieces) else whole[:0]
        assert whole[start:stop].tolist() == mine.tolist()
        assert length == len(pieces[0])


def test_shelves_have_room_for_padded_shards_that_are_aligned() -> None:
    model = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 3, bias=False).bfloat16())
    units = units_of(model, [model[0], model[1]])
    # On each of four ranks: the last has one row less, or none, and as much room.
    found = [UnitSizes.of(unit, 4).share_bytes for unit in units]
    # 2 of 7 rows of 10, 2 of 7 elements; 1 of 3 rows of 7 in 16 bits; the root has none.
    assert found == [128 + 128, 128, 0]
    whole = [UnitSizes.of(unit, 1).share_bytes for unit in units]
    assert whole == [384 + 128, 128, 0]


def test_tied_parameters_stay_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    old, new = model["a"].weight, nn.Parameter(torch.zeros(2, 2))
    other = model["c"].weight
    replace_parameter(model, old, new)
    assert model["a"].weight is model["b"].weight is new
    assert model["c"].weight is other
    assert dict(model.named_parameters()).keys() == {
        "a.weight",
        "a.bias",
        "b.bias",
        "c.weight",
        "c.bias",
    }


CPU = torch.device("cpu")
Shape = tuple[tuple[int, ...], tuple[str, ...] | None]


def shape_of(stage: int, replicas: int) -> Shape | str:
    try:
        mesh = make_mesh(CPU, stage=stage, replicas=replicas)
    except OptionError as error:
        return str(error)
    return tuple(mesh.shape), mesh.mesh_dim_names


@pytest.mark.parametrize(
    ("stage", "replicas", "shape"),
    [
        (3, 1, ((4,), ("shard",))),
        (1, 1, ((4,), ("shard",))),
        (3, 2, ((2, 2), ("replicate", "shard"))),
        (2, 4, ((4, 1), ("replicate", "shard"))),
        (0, 1, ((4, 1), ("replicate", "shard"))),
    ],
)
def test_ranks_are_shards_of_replicas(ranks: Pool, stage: int, replicas: int, shape: Shape) -> None:
    assert ranks(4).run(shape_of, stage, replicas) == [shape] * 4


def test_replicas_that_do_not_divide_the_ranks_are_refused(ranks: Pool) -> None:
    for said in ranks(4).run(shape_of, 3, 3):
        assert "replicas=3 was given for 4 ranks" in said


def groups() -> tuple[int, bool, bool]:
    group = host_group()
    return world_size(), group is None, group is dist.group.WORLD


@pytest.mark.parametrize("world", [1, 2])
def test_host_memory_goes_through_the_group_that_is_there(ranks: Pool, world: int) -> None:
    assert ranks(world).run(groups) == [(world, world == 1, world > 1)] * world


class OfDevice:
    """A default group that takes tensors of an accelerator alone."""

    _device_types = (torch.device("cuda"),)


def test_host_memory_has_one_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, made = OfDevice(), []

    def new_group(backend: str) -> OfDevice:
        assert backend == "gloo"
        made.append(OfDevice())
        return made[-1]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=whole))
    monkeypatch.setattr(dist, "new_group", new_group)
    assert host_group() is made[0]
    assert host_group() is made[0]
    made[0] = OfDevice()  # torch has let go of it, at the end of the process group
    assert host_group() is made[1]


def test_before_any_group_the_launcher_says_which_rank_of_how_many_this_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (rank_here(), world_size()) == (0, 1)  # somebody else's variable
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (rank_here(), world_size()) == (3, 8)


def test_a_group_carries_host_memory_beside_an_accelerator() -> None:
    assert backend_of(CPU) == "gloo"
    assert backend_of(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"


def test_the_device_here_is_one_that_works() -> None:
    assert torch.ones(2, device=current_device()).sum() == 2
