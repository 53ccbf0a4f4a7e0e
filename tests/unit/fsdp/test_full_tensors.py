"""Whole tensors and what each rank has of them, there and back."""

import pytest
import torch
from torch import nn

from ranks.driven import sharded_and_full
from ranks.pool import Ranks
from tensorstow.fsdp.full_tensors import (
    copy_from_full,
    full_copy,
    full_tensor,
    host_dtensor,
    to_local,
)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_all_ranks_are_the_whole(ranks: "Ranks", world: int, stage: int) -> None:
    ranks(world).run(sharded_and_full, stage)


def test_what_nobody_has_cut_stays_as_it_is() -> None:
    weight = nn.Parameter(torch.ones(3))
    whole = torch.arange(3.0)
    assert host_dtensor(whole, weight) is whole
    assert to_local(weight) is weight
    assert full_tensor(whole, weight) is not whole
    copy_from_full(weight, whole)
    assert torch.equal(full_copy(weight), whole)
