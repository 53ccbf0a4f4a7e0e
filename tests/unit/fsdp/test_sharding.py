"""Shards: rows as FSDP2 cuts them, bytes on shelves, and tied parameters that stay tied."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tensorstow.fsdp.sharding import Sharding, exchange, shelf_bytes
from tensorstow.fsdp.units import units_of


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
    for rank in range(4):  # the last has one row less, or none, and as much room
        found = [shelf_bytes(unit, sharding_of(rank, 4)) for unit in units]
        # 2 of 7 rows of 10, 2 of 7 elements; 1 of 3 rows of 7 in 16 bits; the root has none.
        assert found == [128 + 128, 128, 0]
    whole = [shelf_bytes(unit, sharding_of(0, 1)) for unit in units]
    assert whole == [384 + 128, 128, 0]


def test_tied_parameters_stay_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    old, new = model["a"].weight, nn.Parameter(torch.zeros(2, 2))
    other = model["c"].weight
    exchange(model, old, new)
    assert model["a"].weight is model["b"].weight is new
    assert model["c"].weight is other
    assert dict(model.named_parameters()).keys() == {
        "a.weight",
        "a.bias",
        "b.bias",
        "c.weight",
        "c.bias",
    }
