"""How many ranks share this machine, from the environment and from the process group."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensorstow.base.core_share import LocalRanks
from tensorstow.base.errors import OptionError
from tensorstow.io.local_ranks import local_ranks


@pytest.fixture
def group() -> Iterator[Callable[..., None]]:
    """Give what joins a group as one rank of several that are not there; leave it at the end."""

    def join(rank: int, world: int, store: dist.Store | None = None) -> None:
        dist.init_process_group("fake", store=store or FakeStore(), rank=rank, world_size=world)

    if dist.is_initialized():  # of an earlier test: a model that was stowed leaves one
        dist.destroy_process_group()
    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(3))
def test_torchrun_says_both(rank: int) -> None:
    environ = {"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": str(rank)}
    assert local_ranks(environ) == LocalRanks(3, rank)


def test_a_process_alone() -> None:
    assert local_ranks({}) == LocalRanks(1, 0)
    assert local_ranks({"LOCAL_RANK": "3"}) == LocalRanks(1, 0)  # of how many?


def test_without_its_number_a_rank_asks_the_group(group: Callable[..., None]) -> None:
    assert local_ranks({"LOCAL_WORLD_SIZE": "1"}) == LocalRanks(1, 0)
    assert local_ranks({"LOCAL_WORLD_SIZE": "4"}) == LocalRanks(4, None)
    group(6, 8)
    assert local_ranks({"LOCAL_WORLD_SIZE": "4"}) == LocalRanks(4, 2)


def test_a_group_of_fewer_ranks_says_nothing(group: Callable[..., None]) -> None:
    group(0, 1)
    assert local_ranks({"LOCAL_WORLD_SIZE": "4"}) == LocalRanks(4, None)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "-1"}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK"),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2"),
    ],
)
def test_what_cannot_be_is_refused_by_name(environ: dict[str, str], name: str) -> None:
    with pytest.raises(OptionError, match=name):
        local_ranks(environ)


def test_ranks_that_met_at_a_loopback_address_are_on_this_machine(
    group: Callable[..., None],
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=20))
    group(2, 3, store)
    assert local_ranks({}) == LocalRanks(3, 2)


def test_ranks_of_accelerators_are_as_many_as_devices(
    group: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Module:
        @staticmethod
        def device_count() -> int:
            return 4

    group(6, 8)
    assert local_ranks({}) == LocalRanks(1, 0)  # nothing says where the others are
    cuda = torch.device("cuda")
    monkeypatch.setattr(dist.ProcessGroup, "_device_types", [cuda])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: cuda)
    monkeypatch.setattr(torch, "get_device_module", lambda _: Module)
    assert local_ranks({}) == LocalRanks(4, 2)


def test_a_file_may_be_on_a_network(group: Callable[..., None], tmp_path: Path) -> None:
    group(1, 2, dist.FileStore(str(tmp_path / "meeting"), 2))
    assert local_ranks({}) == LocalRanks(1, 0)
