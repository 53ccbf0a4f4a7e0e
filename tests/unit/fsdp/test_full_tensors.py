"""Whole tensors and what each rank has of them, there and back; parameters whole in place."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ranks.driven import sharded_and_full
from ranks.pool import Pool
from tensorstow.fsdp.full_tensors import (
    copy_from_full,
    full_copy,
    full_tensor,
    host_dtensor,
    to_local,
    whole_in_place,
)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_all_ranks_are_the_whole(ranks: Pool, world: int, stage: int) -> None:
    ranks(world).run(sharded_and_full, stage)


def test_what_nobody_has_cut_stays_as_it_is() -> None:
    weight = nn.Parameter(torch.ones(3))
    whole = torch.arange(3.0)
    assert host_dtensor(whole, weight) is whole
    assert to_local(weight) is weight
    assert full_tensor(whole, weight) is not whole
    copy_from_full(weight, whole)
    assert torch.equal(full_copy(weight), whole)


def test_a_sharded_parameter_is_a_plain_one_inside(ranks: Pool) -> None:
    ranks(2).run(whole_on_every_rank)


def whole_on_every_rank() -> None:
    values = torch.arange(6.0).view(3, 2)
    parameter = nn.Parameter(distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)]))
    module = nn.Linear(2, 3, bias=False)
    module.weight = parameter
    with whole_in_place(parameter) as shard:
        assert isinstance(parameter, nn.Parameter)
        assert not isinstance(parameter, DTensor)
        for plain in (parameter.data, parameter.detach(), parameter + 1, parameter.clone()):
            assert type(plain) is torch.Tensor
        assert torch.equal(copy.deepcopy(module).weight, values)
        saved = io.BytesIO()
        torch.save(module.state_dict() | {"parameter": parameter}, saved)
        saved.seek(0)
        for loaded in torch.load(saved, weights_only=True).values():
            assert torch.equal(loaded, values)
        assert list(module(torch.ones(2))) == [1.0, 5.0, 9.0]
        parameter.data.zero_()
        with whole_in_place(parameter) as again:
            assert again is shard
        assert isinstance(shard, DTensor)
    assert isinstance(parameter, DTensor)
    assert torch.equal(parameter.full_tensor(), values)
    assert len(parameter.to_local()) == 2 - dist.get_rank()


def test_the_copy_of_a_parameter_that_is_not_sharded_is_dropped() -> None:
    parameter = nn.Parameter(torch.ones(3))
    with whole_in_place(parameter) as kept:
        parameter.data.zero_()
        kept[0] = 2.0
    assert parameter.tolist() == [2.0, 1.0, 1.0]
