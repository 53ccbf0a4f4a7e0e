"""Parameters that FSDP2 has sharded: each rank's optimizer updates its own, with the same bits."""

import pytest
import torch

from ranks.pool import Ranks
from ranks.sharded import Training, alone, sharded

CASES = [
    Training(),
    Training(states="disk"),
    Training(dtype=torch.bfloat16, states="disk"),
    Training(states="disk", overlap="forward", clip=0.1),
    Training(states="disk", overlap="forward", poison=True),
    Training(states="disk", overlap="forward", poison=True, listed=True),
    Training(states="disk", overlap="forward", poison=True, looked_at=True),
    Training(states="disk", overlap="backward"),
    Training(micro_batches=3, clip=0.05),
    Training(states="disk", overlap="backward", micro_batches=2),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("training", CASES, ids=str)
def test_sharded_training_has_the_bits_of_training_alone(
    ranks: "Ranks", training: Training, world: int
) -> None:
    want = alone(training, world)
    for got in ranks(world).run(sharded, training):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
