"""Whole tensors and what each rank has of them, there and back."""

import pytest
import torch
from torch import nn

from ranks.driven import spread_and_joined
from ranks.pool import Ranks
from tensorstow.deepspeed.spread import joined, own_of, put_whole, rows_of, spread, whole_of


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_all_ranks_are_the_whole(ranks: "Ranks", world: int, stage: int) -> None:
    ranks(world).run(spread_and_joined, stage)


def test_what_nobody_has_cut_stays_as_it_is() -> None:
    weight = nn.Parameter(torch.ones(3))
    whole = torch.arange(3.0)
    assert rows_of(whole, weight) is whole
    assert spread(whole, weight) is whole
    assert own_of(weight) is weight
    assert joined(whole, weight) is not whole
    put_whole(weight, whole)
    assert torch.equal(whole_of(weight), whole)
