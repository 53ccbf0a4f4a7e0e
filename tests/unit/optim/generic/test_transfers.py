"""Pieces between disk and a ring that is too small for all of them."""

from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import BudgetError
from tensorstow.memory.moving_bytes import ByteState
from tensorstow.optim.generic.packing import pack, unpack
from tensorstow.optim.generic.pieces import Piece
from tensorstow.optim.generic.transfers import Transfers, wanted_bytes
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.scratch import open_scratch

BLOCK = 4096


def transfers_with(directory: Path, pieces: int, blocks: int) -> tuple[Transfers, list[Piece]]:
    """Return pieces of one block each, filled with their number, and a ring of ``blocks``."""
    transfers = Transfers(open_scratch([directory], 0, PipelinePolicy()), blocks * BLOCK)
    transfers.make_room(pieces * BLOCK, BLOCK)
    made = [Piece() for _ in range(pieces)]
    for number, piece in enumerate(made):
        transfers.put(piece, pack({"x": torch.full((1000,), float(number))}, least=0))
    return transfers, made


def value(transfers: Transfers, piece: Piece) -> float:
    tensor = unpack(piece.stowed, transfers.read(piece))["x"]
    assert (tensor == tensor[0]).all()
    return float(tensor[0])


def test_what_goes_comes_back_in_any_order(tmp_path: Path) -> None:
    transfers, pieces = transfers_with(tmp_path, 7, 2)
    for number in (6, 0, 3, 3, 5):
        assert value(transfers, pieces[number]) == number
        transfers.drop(pieces[number])
    assert transfers.capacity == transfers.traffic().ring_high_water_bytes == 2 * BLOCK


def test_reading_ahead_ends_where_the_ring_does(tmp_path: Path) -> None:
    transfers, pieces = transfers_with(tmp_path, 4, 2)
    transfers.wait_written()
    assert [transfers.read_ahead(piece) for piece in pieces[:3]] == [True, True, False]
    assert [piece.state for piece in pieces] == [ByteState.READING] * 2 + [ByteState.ABSENT] * 2
    for piece in pieces[:2]:
        transfers.read(piece)
        transfers.write(piece)
    assert value(transfers, pieces[2]) == 2


def test_a_piece_that_is_being_written_is_read_after_the_write(tmp_path: Path) -> None:
    transfers, [piece] = transfers_with(tmp_path, 1, 1)
    for number in range(20):
        region = transfers.read(piece)
        unpack(piece.stowed, region)["x"].fill_(number)
        transfers.write(piece)
        assert value(transfers, piece) == number
        transfers.drop(piece)


def test_a_piece_that_grows_moves(tmp_path: Path) -> None:
    transfers, pieces = transfers_with(tmp_path, 2, 4)
    before = pieces[0].extent
    entry = unpack(pieces[0].stowed, transfers.read(pieces[0]))
    transfers.put(pieces[0], pack({**entry, "y": torch.ones(1000)}, least=0))
    assert pieces[0].extent != before
    assert value(transfers, pieces[0]) == 0
    assert (unpack(pieces[0].stowed, transfers.read(pieces[0]))["y"] == 1).all()
    transfers.drop(pieces[0])
    assert value(transfers, pieces[1]) == 1


def test_a_piece_that_is_forgotten_is_nowhere(tmp_path: Path) -> None:
    transfers, [piece] = transfers_with(tmp_path, 1, 1)
    transfers.forget(piece)
    assert (piece.extent, piece.slots, piece.stepped) == (None, (), False)
    assert transfers.traffic().bytes_written == BLOCK


def test_how_much_memory_is_wanted() -> None:
    assert wanted_bytes(100, 10, None) == 100
    assert wanted_bytes(1 << 40, 10, None) == 64 << 20
    assert wanted_bytes(1 << 40, 1 << 30, None) == 1 << 30
    assert wanted_bytes(1 << 40, 10, 1000) == 1000
    with pytest.raises(BudgetError, match="ram_budget"):
        wanted_bytes(1 << 40, 1001, 1000)


def test_a_ring_with_no_room_and_nothing_in_flight_says_so(tmp_path: Path) -> None:
    transfers, pieces = transfers_with(tmp_path, 2, 1)
    transfers.read(pieces[0])
    with pytest.raises(BudgetError, match="no room"):
        transfers.read(pieces[1])
