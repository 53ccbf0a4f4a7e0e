"""The share of one rank, on machines that are made up."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tensorstow.base import cores, nodes
from tensorstow.base.core_share import CoreShare, LocalRanks
from tensorstow.io import local_share
from tensorstow.io.local_share import (
    AcceleratorNodes,
    accelerator_nodes,
    fair_threads,
    is_bound,
    share_here,
    usable_cores,
)
from topology import make_nodes, pretend_nodes


@pytest.mark.parametrize(
    ("total", "ranks", "expected"),
    [(8, None, 8), (8, "2", 4), (8, "3", 2), (8, "64", 1), (4, "2", 2)],
)
def test_usable_cores(
    total: int, ranks: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_share, "process_cores", lambda: total)
    monkeypatch.setattr(local_share, "launcher_cores", frozenset)
    environ = {"OMP_NUM_THREADS": "1"} | ({"LOCAL_WORLD_SIZE": ranks} if ranks else {})
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert usable_cores() == expected


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sixteen cores on two nodes, two of which may not be used."""
    pretend_nodes(monkeypatch, tmp_path, {0: "0-7", 1: "8-15"}, 14)


@pytest.mark.usefixtures("two_nodes")
def test_ranks_of_several_nodes_have_their_share_of_one() -> None:
    first, last = tuple(range(8)), tuple(range(8, 14))
    assert share_here(local=LocalRanks(2, 0)) == CoreShare(7, (0,), first)
    assert share_here(local=LocalRanks(2, 1)) == CoreShare(6, (1,), last)
    assert share_here(local=LocalRanks(1, 0)) == CoreShare(14)
    assert share_here(1, local=LocalRanks(1, 0)) == CoreShare(6, (1,), last)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("found", "rank", "expected"),
    [
        (AcceleratorNodes((1, 0), 0), 0, (1,)),
        (AcceleratorNodes((1, 0), 1), 1, (0,)),
        (AcceleratorNodes((1,), 0), 1, (1,)),  # each rank sees its own device alone
        (AcceleratorNodes((None, 0), 0), 0, (0,)),  # not told: spread by rank
        (AcceleratorNodes((7, 7), 1), 1, (1,)),  # not a node that may be used
    ],
)
def test_a_rank_goes_to_the_node_of_its_device(
    found: AcceleratorNodes, rank: int, expected: tuple[int, ...]
) -> None:
    assert share_here(local=LocalRanks(2, rank), devices=found).nodes == expected


@pytest.fixture
def as_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, int, int], None]:
    """Give what makes this process a rank with cores of its own under a launcher with 64."""

    def become(mine: str, rank: int, count: int) -> None:
        first, last = map(int, mine.split("-"))
        own, all_cores = set(range(first, last + 1)), set(range(64))
        monkeypatch.setattr(nodes, "_NODES", make_nodes(tmp_path, {0: "0-31", 1: "32-63"}))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: all_cores if pid else own)
        monkeypatch.setattr(cores, "quota_cores", lambda _: None)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
        monkeypatch.setenv("LOCAL_RANK", str(rank))

    return become


@pytest.mark.parametrize(
    ("mine", "rank", "count", "threads"),
    [
        ("8-15", 1, 8, 8),  # cores of its own
        ("32-63", 7, 8, 8),  # a node, that four ranks are bound to
        ("24-39", 1, 4, 16),  # on both nodes, which is as the launcher wants it
        ("0-31", 0, 1, 32),
        ("0-9", 0, 6, 10),
    ],
)
def test_what_a_launcher_has_divided_is_not_divided_again(
    mine: str, rank: int, count: int, threads: int, as_bound: Callable[[str, int, int], None]
) -> None:
    as_bound(mine, rank, count)
    assert is_bound()
    assert share_here() == CoreShare(threads)
    assert fair_threads() == threads


def test_a_bound_rank_may_name_a_node(as_bound: Callable[[str, int, int], None]) -> None:
    as_bound("24-39", 1, 4)
    assert share_here(1) == CoreShare(8, (1,), tuple(range(32, 40)))


def test_a_launcher_that_is_bound_itself_has_ranks_that_share(
    as_bound: Callable[[str, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_bound("0-7", 1, 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert not is_bound()
    assert share_here().threads == fair_threads() == 2


H100 = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
OTHER = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xAF, pci_device_id=2)


def pretend(monkeypatch: pytest.MonkeyPatch, *, is_in_use: bool, current: int = 0) -> None:
    """Have three devices, the last of a kind that has no address."""
    devices = [H100, OTHER, SimpleNamespace()]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_in_use)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)


def test_each_device_has_a_node_where_the_system_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, node in {"0000:3b:00.0": "1", "0001:af:02.0": "0"}.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n", encoding="ascii")
    monkeypatch.setattr(nodes, "_PCI", tmp_path)
    pretend(monkeypatch, is_in_use=True, current=1)
    assert accelerator_nodes() == AcceleratorNodes((1, 0, None), current=1)


def test_a_device_that_is_not_in_use_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, is_in_use=False)
    assert accelerator_nodes() is None
    assert accelerator_nodes(initialise=True) is not None


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert accelerator_nodes(initialise=True) is None
