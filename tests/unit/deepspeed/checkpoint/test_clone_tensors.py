"""Copies of tensors that torch saves."""

from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks.pool import Ranks
from tensorstow.deepspeed.checkpoint.utils import clone_tensors_for_torch_save


def test_what_is_around_tensors_stays_as_it_is() -> None:
    large = torch.arange(1000.0)
    given = OrderedDict(a=[large[:2], 1], b=(nn.Parameter(torch.ones(2)), "text"))
    copied = clone_tensors_for_torch_save(given)
    assert type(copied) is OrderedDict
    assert copied["a"][0].untyped_storage().nbytes() == 8
    assert copied["a"][1:] == [1]
    assert torch.equal(copied["a"][0], large[:2])
    assert type(copied["b"][0]) is torch.Tensor
    assert not copied["b"][0].requires_grad
    assert copied["b"][1] == "text"
    assert clone_tensors_for_torch_save(large, "meta").is_meta


def test_sharded_ones_are_whole(ranks: "Ranks") -> None:
    for copied in ranks(2).run(whole):
        assert torch.equal(copied, torch.arange(6.0).view(3, 2))


def whole() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    return clone_tensors_for_torch_save({"weight": sharded})["weight"]
