"""Parameters that FSDP2 has sharded: each rank's optimizer updates its own, with the same bits."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from compare import all_equal
from ranks.pool import Ranks
from ranks.sharded import Training, alone, sharded
from tensorstow.tensors.dtensor import OffloadedWeight, in_memory, part_of

CASES = [
    Training(),
    Training(states="disk"),
    Training(dtype=torch.bfloat16, states="disk"),
    Training(states="disk", overlap="forward", clip=0.1),
    Training(states="disk", overlap="forward", nan_until_published=True),
    Training(states="disk", overlap="forward", nan_until_published=True, listed=True),
    Training(states="disk", overlap="forward", nan_until_published=True, looked_at=True),
    Training(states="disk", overlap="backward"),
    Training(micro_batches=3, clip=0.05),
    Training(states="disk", overlap="backward", micro_batches=2),
    # 16-bit weights have masters, which are made anew: a DTensor alone knows that it was written.
    Training(dtype=torch.bfloat16, states="disk", halved=True),
    Training(dtype=torch.bfloat16, overlap="forward", nan_until_published=True, halved=True),
]


class PooledBuffer:
    """Writes down who pinned what."""

    nbytes = 8

    def __init__(self) -> None:
        self.log: list[str] = []

    def expect(self, following: Sequence["PooledBuffer"]) -> None:
        """Do nothing."""

    def can_pin(self, nbytes: int) -> bool:
        """Have room."""
        return nbytes > 0

    def pin(self, *, for_write: bool = False) -> None:
        """Note it."""
        self.log.append(f"+{for_write}")

    def unpin(self, *, dirty: bool = False) -> None:
        """Note it."""
        self.log.append(f"-{dirty}")


class OnDisk(OffloadedWeight):
    """A weight in a buffer."""

    source: PooledBuffer

    @property
    def pager(self) -> Any:  # noqa: ANN401
        """Return the buffer."""
        return self.source


def test_bytes_on_disk_are_pinned_for_as_long_as_they_are_used() -> None:
    with in_memory(torch.zeros(2)):
        pass  # which has memory of its own
    buffer = PooledBuffer()
    weight = torch.zeros(2).as_subclass(OnDisk)
    weight.source = buffer
    with in_memory(weight):
        assert buffer.log == ["+False"]
    message = "in the middle"
    with pytest.raises(ValueError, match=message), in_memory(weight, for_write=True):
        raise ValueError(message)
    assert buffer.log == ["+False", "-False", "+True", "-True"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("training", CASES, ids=str)
def test_sharded_training_has_the_bits_of_training_alone(
    ranks: "Ranks", training: Training, world: int
) -> None:
    want = alone(training, world)
    for got in ranks(world).run(sharded, training):
        assert all_equal(got, want)


def test_a_part_of_a_whole_tensor_is_cut_without_a_process_group() -> None:
    """An equal mesh of a group that has ended may come out of torch's cache of operations."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parameter = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    finally:
        dist.destroy_process_group()
    whole = torch.arange(8.0).view(4, 2)
    assert torch.equal(part_of(whole, parameter, "weight"), whole)
