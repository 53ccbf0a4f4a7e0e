"""Pieces between disk and a ring that is too small for all of them."""

from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import BudgetError
from tensorstow.optim.generic.packing import place, restore
from tensorstow.optim.generic.pieces import Motion, Piece
from tensorstow.optim.generic.places import ScratchPlaces
from tensorstow.optim.generic.transfers import Mover, wanted_bytes
from tensorstow.states.policy import PipelinePolicy

BLOCK = 4096


def mover_with(directory: Path, pieces: int, blocks: int) -> tuple[Mover, list[Piece]]:
    """Return pieces of one block each, filled with their number, and a ring of ``blocks``."""
    mover = Mover(ScratchPlaces([directory], 0, PipelinePolicy()), blocks * BLOCK)
    mover.make_room(pieces * BLOCK, BLOCK)
    made = [Piece() for _ in range(pieces)]
    for number, piece in enumerate(made):
        mover.put(piece, place({"x": torch.full((1000,), float(number))}, least=0))
    return mover, made


def value(mover: Mover, piece: Piece) -> float:
    tensor = restore(piece.stowed, mover.arrive(piece))["x"]
    assert (tensor == tensor[0]).all()
    return float(tensor[0])


def test_what_goes_comes_back_in_any_order(tmp_path: Path) -> None:
    mover, pieces = mover_with(tmp_path, 7, 2)
    for number in (6, 0, 3, 3, 5):
        assert value(mover, pieces[number]) == number
        mover.drop(pieces[number])
    assert mover.capacity == mover.high_water == 2 * BLOCK


def test_reading_ahead_ends_where_the_ring_does(tmp_path: Path) -> None:
    mover, pieces = mover_with(tmp_path, 4, 2)
    mover.settle()
    assert [mover.read_ahead(piece) for piece in pieces[:3]] == [True, True, False]
    assert [piece.motion for piece in pieces] == [Motion.READING] * 2 + [Motion.AT_REST] * 2
    for piece in pieces[:2]:
        mover.arrive(piece)
        mover.depart(piece)
    assert value(mover, pieces[2]) == 2


def test_a_piece_on_its_way_out_is_read_after_it_has_landed(tmp_path: Path) -> None:
    mover, [piece] = mover_with(tmp_path, 1, 1)
    for number in range(20):
        region = mover.arrive(piece)
        restore(piece.stowed, region)["x"].fill_(number)
        mover.depart(piece)
        assert value(mover, piece) == number
        mover.drop(piece)


def test_a_piece_that_grows_moves(tmp_path: Path) -> None:
    mover, pieces = mover_with(tmp_path, 2, 4)
    before = pieces[0].place
    entry = restore(pieces[0].stowed, mover.arrive(pieces[0]))
    mover.put(pieces[0], place({**entry, "y": torch.ones(1000)}, least=0))
    assert pieces[0].place != before
    assert value(mover, pieces[0]) == 0
    assert (restore(pieces[0].stowed, mover.arrive(pieces[0]))["y"] == 1).all()
    mover.drop(pieces[0])
    assert value(mover, pieces[1]) == 1


def test_a_piece_that_is_forgotten_is_nowhere(tmp_path: Path) -> None:
    mover, [piece] = mover_with(tmp_path, 1, 1)
    mover.forget(piece)
    assert (piece.place, piece.slots, piece.stepped) == (None, (), False)
    assert mover.traffic().bytes_written == BLOCK


def test_how_much_memory_is_wanted() -> None:
    assert wanted_bytes(100, 10, None) == 100
    assert wanted_bytes(1 << 40, 10, None) == 64 << 20
    assert wanted_bytes(1 << 40, 1 << 30, None) == 1 << 30
    assert wanted_bytes(1 << 40, 10, 1000) == 1000
    with pytest.raises(BudgetError, match="ram_budget"):
        wanted_bytes(1 << 40, 1001, 1000)


def test_a_ring_with_no_room_and_nothing_in_flight_says_so(tmp_path: Path) -> None:
    mover, pieces = mover_with(tmp_path, 2, 1)
    mover.arrive(pieces[0])
    with pytest.raises(BudgetError, match="no room"):
        mover.arrive(pieces[1])
