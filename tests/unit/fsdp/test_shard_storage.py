"""Cells: bytes in host memory, and bytes on a shelf that are read for whoever opens them."""

from pathlib import Path

import pytest
import torch

from tensorstow.fsdp.prefetch import Prefetcher
from tensorstow.fsdp.shard_storage import Cell, ShelvedCell
from tensorstow.io.buffer_pool import Shelves

MIB = 1 << 20


def test_home_is_without_the_padding() -> None:
    cell = Cell(torch.arange(6.0).view(3, 2), 2)
    assert cell.home.tolist() == [[0, 1], [2, 3]]
    assert cell.open() is cell.padded
    assert cell.lessor is None


def test_whoever_reads_waits_for_the_newest_weight() -> None:
    cell = Cell(torch.zeros(2, 2), 2)
    waited: list[bool] = []
    cell.before_read = lambda: waited.append(True)
    cell.open()
    with cell.opened(to_change=False):
        pass
    assert waited == [True, True]


def test_a_shelved_cell_is_read_when_opened_and_written_when_changed(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 2 * MIB, MIB)
    shelf, other = shelves.add(MIB), shelves.add(MIB)
    cell = ShelvedCell(shelf.tensor(0, (4, 2), torch.float32), 3, shelf, Prefetcher(0))
    with cell.opened(to_change=True):
        cell.home.fill_(5.0)
    with torch.no_grad():
        other.lease()  # takes the memory
        assert not shelf.present
        other.release()
    assert cell.open()[:3].eq(5.0).all()
    assert cell.open_to_copy() is cell.padded
    cell.copied()
    assert shelf.leases == 1
    cell.close()
    assert shelves.bytes_written == MIB
    assert shelf.leases == 0


def test_what_could_not_be_opened_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelves = Shelves(tmp_path, MIB, MIB)
    shelf = shelves.add(4096)
    prefetcher = Prefetcher(1)
    cell = ShelvedCell(shelf.tensor(0, (4, 2), torch.float32), 4, shelf, prefetcher)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prefetcher, "used", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cell.open()
    assert shelf.leases == 0
    shelves.close()
