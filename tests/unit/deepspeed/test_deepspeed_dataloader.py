"""Micro-batches of a data set, each rank its own."""

from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset, TensorDataset

from tensorstow.deepspeed import utils
from tensorstow.deepspeed.config.settings import Batch, Settings
from tensorstow.deepspeed.runtime.dataloader import RepeatingLoader, make_dataloader


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def settings(world: int, **more: object) -> Settings:
    return Settings(Batch(2 * world, 2, 1), **more)


def test_a_rank_sees_its_share_in_micro_batches() -> None:
    batches = [b for (b,) in make_dataloader(TensorDataset(torch.arange(12)), settings(3))]
    assert [len(b) for b in batches] == [2, 2]
    assert len({int(x) for b in batches for x in b}) == 4


def test_what_is_left_over_may_be_dropped() -> None:
    data = TensorDataset(torch.arange(5))
    assert [len(b) for (b,) in make_dataloader(data, settings(1))] == [2, 2, 1]
    dropped = make_dataloader(data, settings(1, dataloader_drop_last=True))
    assert [len(b) for (b,) in dropped] == [2, 2]


def test_an_iterable_is_taken_as_it_is_and_collated() -> None:
    loader = make_dataloader(Endless(), settings(2), collate_fn=sum)
    assert list(loader) == [1, 5, 4]


def test_samples_come_in_order_or_as_a_sampler_says() -> None:
    data = TensorDataset(torch.arange(6))
    in_order = make_dataloader(data, settings(1), batch_size=3, shuffled=False)
    assert [b.tolist() for (b,) in in_order] == [[0, 1, 2], [3, 4, 5]]
    chosen = make_dataloader(data, settings(1), sampler=[5, 1])
    assert [b.tolist() for (b,) in chosen] == [[5, 1]]


def test_a_loader_begins_again() -> None:
    assert utils.RepeatingLoader is RepeatingLoader
    repeating = iter(RepeatingLoader([1, 2]))
    assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert not list(RepeatingLoader([]))
