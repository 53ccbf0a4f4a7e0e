"""The loader of training data: each rank's own micro-batches."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from tensorstow.deepspeed.config.settings import Settings
from tensorstow.deepspeed.plans import world_of
from tensorstow.deepspeed.ranks import rank_here


def make_dataloader(
    data: Dataset[Any], settings: Settings, collate_fn: Callable[[list[Any]], Any] | None = None
) -> DataLoader[Any]:
    """Return a dataloader of micro-batches, different ones on each rank.

    ``loader.sampler.set_epoch`` reshuffles. An iterable dataset is used as it is, and must
    select its rank's samples itself.
    """
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, world_of(settings), rank_here())
    return DataLoader(
        data,
        batch_size=settings.batch.micro,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=settings.dataloader_drop_last,
    )
