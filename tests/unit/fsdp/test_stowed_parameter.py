"""Stowed parameters: tensors without memory, whose reads return the newest bytes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import tensorstow
from ranks.pool import Pool
from ranks.stowed import twins
from ranks.twin import Twins
from tensorstow import PipelinePolicy, Plan
from tensorstow.fsdp.shard_storage import ShardStorage
from tensorstow.fsdp.stowed_parameter import AllGatherInput, StowedParameter

POISONED = partial(tensorstow.AdamW, lr=1e-2, policy=PipelinePolicy(nan_until_published=True))
"""Weights are NaN until somebody has waited for them."""


def stowed(padded: torch.Tensor, rows: int, *, is_sharded: bool = True) -> StowedParameter:
    storage = ShardStorage(padded, rows)
    storage.is_sharded = is_sharded
    like = torch.empty((rows, *padded.shape[1:]), device="meta")
    return StowedParameter(like, torch.device("cpu"), AllGatherInput(storage))


@contextmanager
def counted(storage: ShardStorage) -> Iterator[list[bool]]:
    """Note who accesses the storage, and whether to write."""
    noted: list[bool] = []
    access = storage.access

    def noting(*, write: bool) -> AbstractContextManager[None]:
        noted.append(write)
        return access(write=write)

    storage.access = noting
    yield noted


def test_until_it_is_sharded_there_is_arithmetic_over_shapes_alone() -> None:
    parameter = stowed(torch.zeros(6, 3), 4, is_sharded=False)
    padded = parameter.new_zeros((6, 3))
    padded.narrow(0, 0, 4).copy_(parameter)
    parameter.fill_(1.0)  # of no bytes
    first, second = padded.split(3)
    for part, shape in ((padded, (6, 3)), (first, (3, 3)), (second.view(-1), (9,))):
        assert isinstance(part, StowedParameter)
        assert part.source is parameter.source
        assert part.shape == shape
    assert parameter.source.storage.padded.eq(0.0).all()


def test_reading_accesses_the_storage_and_gives_memory_of_its_own() -> None:
    parameter = stowed(torch.arange(8.0).view(4, 2), 3)
    with counted(parameter.source.storage) as noted:
        read = parameter.clone()
        total = parameter + 1.0
    assert noted == [False, False]
    assert (type(read), type(total)) == (torch.Tensor, torch.Tensor)
    assert total.tolist() == [[1, 2], [3, 4], [5, 6]]
    read.zero_()
    assert parameter.local_shard.sum() == 15.0


def test_writing_accesses_it_to_write_and_counts_as_a_version() -> None:
    parameter = stowed(torch.zeros(4, 2), 3)
    version = parameter.local_shard._version
    with counted(parameter.source.storage) as noted:
        assert parameter.add_(2.0) is parameter
    assert noted == [True]
    assert parameter.local_shard._version > version
    assert parameter.source.storage.padded.tolist() == [[2, 2], [2, 2], [2, 2], [0, 0]]


def test_two_parameters_are_accessed_both_and_one_to_write() -> None:
    ours, theirs = stowed(torch.zeros(2, 2), 2), stowed(torch.full((2, 2), 3.0), 2)
    with counted(ours.source.storage) as written, counted(theirs.source.storage) as read:
        ours.copy_(theirs)
    assert (written, read) == ([True], [False])
    assert ours.local_shard.tolist() == [[3, 3], [3, 3]]


def test_a_write_of_a_view_reaches_the_bytes() -> None:
    """``detach`` is the parameter again, so writes by ``.data`` or ``detach`` reach it."""
    parameter = stowed(torch.zeros(3, 2), 2)
    parameter.detach().fill_(1.0)
    assert parameter.local_shard.eq(1.0).all()
    version = parameter.local_shard._version
    with counted(parameter.source.storage) as noted:
        row = parameter.view(-1)[2:]
        row.fill_(2.0)
    assert noted == [True]
    assert parameter.local_shard._version > version
    assert parameter.source.storage.padded.tolist() == [[1, 1], [2, 2], [0, 0]]


READERS: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "full_tensor": lambda p: p.full_tensor(),
    "to_local": lambda p: p.to_local() + 0.0,
    "arithmetic": lambda p: (p * 1.0).full_tensor(),
    "unshard": lambda p: p,  # which is whole by then
}


def _own(theirs: torch.Tensor, ours: torch.Tensor, read: str, both: Twins) -> torch.Tensor:
    """Return what is to be read: this rank's rows, or all."""
    if read != "to_local":
        return theirs
    each = -(-len(theirs) // both.world)
    return theirs[each * both.rank :][: len(ours.to_local())]


def read_at_once(read: str) -> bool:
    """Read every weight in one way while its update is under way; return whether all are right."""
    plan = Plan(overlap="forward", states="disk")
    both = twins(plan, optimizer=POISONED)
    right = []
    for batch in range(2):
        both.backward(batch)
        both.step()
        groups = [m for m in both.stowed.modules() if isinstance(m, FSDPModule)]
        for group in groups if read == "unshard" else ():
            group.unshard()
        for ours, theirs in zip(both.stowed.parameters(), both.alone.parameters(), strict=True):
            right.append(torch.equal(READERS[read](ours), _own(theirs, ours, read, both)))
        for group in groups:
            group.reshard()
    both.close()
    return all(right)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("world", [1, 2])
def test_whoever_reads_a_weight_past_the_model_waits_for_its_update(
    ranks: Pool, world: int, read: str
) -> None:
    """A reader that did not wait would see NaN."""
    assert ranks(world).run(read_at_once, read) == [True] * world
