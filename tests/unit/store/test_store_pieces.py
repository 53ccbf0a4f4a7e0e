"""Pieces of tensors are chained, those of chunks stand alone; see test_store_scrub for the rest."""

import torch

from tensorstow.store.checksums import PIECE_BYTES
from tensorstow.store.records import ChunkRecord, ChunkShape, Extent, StreamShape, TensorRecord
from tensorstow.store.scrub import chunk_pieces, tensor_pieces


def test_a_tensor_of_nothing_has_no_pieces() -> None:
    assert list(tensor_pieces(TensorRecord("a", "b", "int8", (0, 2), Extent(0, 0, 0), 0))) == []


def test_only_the_last_piece_judges() -> None:
    record = TensorRecord("a", "b", "uint8", (PIECE_BYTES + 1,), Extent(1, 4096, 1 << 30), 77)
    first, last = tensor_pieces(record)
    assert (first.file, first.offset, first.nbytes) == (1, 4096, PIECE_BYTES)
    assert (last.offset, last.nbytes) == (4096 + PIECE_BYTES, 1)
    data = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
    assert first.check(data.data_ptr()) == []
    (flaw,) = last.check(data.data_ptr())
    assert flaw[:2] == (4096, PIECE_BYTES + 1)


def test_a_blank_chunk_without_weights_has_nothing_to_read() -> None:
    shape = ChunkShape(64, 32, (StreamShape(4, 1),), StreamShape(0, 1))
    record = ChunkRecord(0, Extent(0, 0, 0), blank=True, checksums=b"", weight_checksums=b"")
    assert chunk_pieces(record, shape) == []
