"""Shelves: bytes come to memory for a lease, go when others need the room, and are never wrong."""

from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import DamageError, DirectoryError, PoisonedError
from tensorstow.io.buffer_pool import Shelf, Shelves

SIZE = 1 << 20


def _fill(shelf: Shelf, value: int) -> None:
    shelf.lease(to_change=True)
    shelf.bytes.fill_(value)
    shelf.release(changed=True)


def _all_are(shelf: Shelf, value: int) -> bool:
    shelf.lease()
    try:
        return bool((shelf.bytes == value).all())
    finally:
        shelf.release()


def test_bytes_come_back_as_they_were_written_within_the_capacity(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 4 * SIZE, 2 * SIZE)
    made = [shelves.add(SIZE) for _ in range(4)]
    for value, shelf in enumerate(made):
        _fill(shelf, value + 1)
    assert all(_all_are(shelf, value + 1) for value, shelf in enumerate(made))
    assert shelves.high_water_bytes == 2 * SIZE
    assert shelves.bytes_written == 4 * SIZE
    assert shelves.bytes_read == 4 * SIZE


def test_what_is_in_memory_is_not_read_again(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, SIZE, SIZE)
    shelf = shelves.add(SIZE)
    _fill(shelf, 7)
    assert _all_are(shelf, 7)
    assert shelves.bytes_read == 0


def test_pages_are_given_back(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 2 * SIZE, SIZE)
    first, second = shelves.add(SIZE), shelves.add(SIZE)
    _fill(first, 3)
    _fill(second, 4)
    assert not first.present
    assert int(first.bytes[0]) == 0  # not its bytes: a page of zeros


def test_a_lease_keeps_its_bytes_whatever_the_capacity(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 3 * SIZE, SIZE)
    made = [shelves.add(SIZE) for _ in range(3)]
    for value, shelf in enumerate(made):
        _fill(shelf, value + 1)
    for shelf in made:
        shelf.lease()
    assert [int(shelf.bytes[0]) for shelf in made] == [1, 2, 3]
    assert shelves.held_bytes == 3 * SIZE


def test_what_fits_leaves_room_for_one_more(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 4 * SIZE, 3 * SIZE)
    made = [shelves.add(SIZE) for _ in range(4)]
    assert made[0].fits(2 * SIZE)
    assert not made[0].fits(2 * SIZE + 1)
    made[1].lease()
    assert made[0].fits(SIZE)
    made[2].lease()
    assert not made[0].fits(SIZE)
    made[1].release()
    assert made[0].fits(SIZE)  # what is there and not leased makes room


def test_fetching_takes_no_memory_from_a_lease(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 4 * SIZE, 3 * SIZE)
    made = [shelves.add(SIZE) for _ in range(4)]
    for value, shelf in enumerate(made):
        _fill(shelf, value + 1)
    shelves.settle()
    for shelf in made[:3]:
        shelf.lease()
    made[3].fetch()
    assert not made[3].present
    for shelf in made[:3]:
        shelf.release()
    made[3].fetch()
    assert [shelf.present for shelf in made] == [False, True, True, True]


def test_fetching_takes_no_memory_from_the_two_used_last(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 3 * SIZE, 2 * SIZE)
    made = [shelves.add(SIZE) for _ in range(3)]
    for value, shelf in enumerate(made):
        _fill(shelf, value + 1)
    shelves.settle()
    made[0].fetch()
    assert [shelf.present for shelf in made] == [False, True, True]


def test_a_change_is_written_when_the_last_lease_ends(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, SIZE, SIZE)
    shelf = shelves.add(SIZE)
    shelf.lease()
    shelf.lease(to_change=True)
    shelf.release(changed=True)
    assert shelves.bytes_written == 0
    shelf.release()
    assert shelves.bytes_written == SIZE


def test_other_bytes_on_disk_are_damage_and_nobody_goes_on(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, 2 * SIZE, SIZE)
    first, second = shelves.add(SIZE), shelves.add(SIZE)
    _fill(first, 1)
    _fill(second, 2)
    shelves.settle()
    block = torch.zeros(4096, dtype=torch.uint8)
    shelves._file.write(block, first.offset + 8192).wait()
    with pytest.raises(DamageError, match="checksum"):
        first.lease()
    with pytest.raises(PoisonedError, match="resume"):
        second.lease()


def test_too_little_room_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError):
        Shelves(tmp_path, 1 << 60, SIZE)
