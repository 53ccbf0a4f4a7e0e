"""``deepspeed.runtime.dataloader``: each rank's own micro-batches, once or again and again."""

from collections.abc import Callable, Iterable
from typing import Any, Self

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from tensorstow.deepspeed.config.settings import Settings
from tensorstow.deepspeed.plans import world_of
from tensorstow.fsdp.sharding import rank_here


def make_dataloader(
    data: Dataset[Any],
    settings: Settings,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    *,
    batch_size: int | None = None,
    sampler: Sampler[Any] | None = None,
    shuffled: bool = True,
    workers: int = 0,
    pinned: bool = False,
) -> DataLoader[Any]:
    """Return a dataloader of micro-batches, different ones on each rank.

    ``batch_size`` None is the configuration's; without a ``sampler`` each rank has a share, and
    ``loader.sampler.set_epoch`` reshuffles. An iterable dataset is used as it is, and must select
    its rank's samples itself.
    """
    if sampler is None and not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, world_of(settings), rank_here(), shuffle=shuffled)
    return DataLoader(
        data,
        batch_size=batch_size or settings.batch.micro,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=settings.dataloader_drop_last,
        num_workers=workers,
        pin_memory=pinned,
    )


class RepeatingLoader:
    """An iterator over a loader that begins again when the loader ends.

    Args:
        loader: What is iterated over, again and again.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch; StopIteration if the loader has none at all."""
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
