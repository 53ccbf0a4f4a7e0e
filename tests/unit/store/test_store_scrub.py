"""Reading back: each flaw is found and placed; shared extents are read once; memory is bounded."""

import errno as codes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from powerloss.contents import (
    SHAPE,
    damages_in,
    layout_of,
    make_content,
    scrubbed,
    write_chunk,
)
from tensorstow.base.errors import DamageError
from tensorstow.store.checksums import PIECE_BYTES
from tensorstow.store.records import (
    ChunkRecord,
    ChunkShape,
    Content,
    Extent,
    StreamShape,
    TensorRecord,
)
from tensorstow.store.scrub import chunk_pieces, tensor_pieces
from tensorstow.store.store import Store


def flip(store: Store, extent: Extent, at: int) -> None:
    block = torch.empty(4096, dtype=torch.uint8)
    start = extent.offset + at // 4096 * 4096
    store.files[extent.file].read(block, start).wait()
    block[at % 4096] ^= 1
    store.files[extent.file].write(block, start).wait()


def test_an_empty_store_has_no_flaws(store: Store) -> None:
    assert scrubbed(store) == []


def test_everything_is_read_once(store: Store) -> None:
    content = make_content(store, 1)
    store.commit(content)
    store.add_snapshot("a")
    store.commit(replace(content, step=2))
    progress = scrubbed(store)
    chunks = sum(SHAPE.nbytes - (SHAPE.weight_offset if r.blank else 0) for r in content.chunks)
    assert progress[-1].done_bytes == progress[-1].total_bytes == chunks + 7 * 8
    assert [p.damages for p in progress] == [()] * 4
    assert [p.done_bytes for p in progress] == sorted(p.done_bytes for p in progress)


def test_each_flaw_is_placed(store: Store) -> None:
    records = [write_chunk(store, k, k) for k in range(2)]
    store.commit(Content(1, layout_of(2), None, None, records))
    store.add_snapshot("a")
    store.commit(Content(2, layout_of(2), None, None, records))
    second = records[1].extent
    flip(store, second, 4096 + 2 * 1500)  # in the second stream, block 1
    flip(store, second, 4096 + 2 * 2999)  # and block 2
    flip(store, second, SHAPE.weight_offset + 2 * 2999 + 1)
    flip(store, second, SHAPE.weight_offset + 2 * 3000)  # behind the end: nobody's
    states, weights = damages_in(store)
    assert states.description == "chunk 1, states of elements 1024 to 2999 differ"
    assert (states.path, states.generations) == (store.files[0].path, (1, 2))
    assert states.offset == second.offset + 1024 // 32 * 4
    assert weights.description == "chunk 1, weights of elements 2048 to 2999 differ"
    assert weights.offset == second.offset + SHAPE.weight_offset + 2 * 2048
    assert weights.nbytes == 2 * (3000 - 2048)
    assert f"{states.path}, " in str(states)


def test_states_of_a_blank_chunk_are_not_looked_at(store: Store) -> None:
    record = write_chunk(store, 0, 1, blank=True)
    store.commit(Content(1, layout_of(1), None, None, [record]))
    flip(store, record.extent, 5)
    assert damages_in(store) == []
    flip(store, record.extent, SHAPE.weight_offset)
    assert len(damages_in(store)) == 1


def test_a_long_tensor_is_read_in_pieces(store: Store) -> None:
    tensor = torch.arange(PIECE_BYTES // 4 + 100)
    record = store.write_tensor("frozen", "table", tensor)
    store.commit(Content(1, layout_of(0), None, None, [], [record]))
    assert [p.done_bytes for p in scrubbed(store)] == [
        PIECE_BYTES,
        2 * PIECE_BYTES,
        2 * PIECE_BYTES + 800,
    ]
    flip(store, record.extent, 12345)
    (damage,) = damages_in(store)
    assert "frozen tensor 'table' has checksum" in damage.description
    assert (damage.offset, damage.nbytes) == (record.extent.offset, tensor.numel() * 8)


def test_bytes_that_cannot_be_read_are_damage(store: Store) -> None:
    records = [write_chunk(store, k, k) for k in range(3)]
    store.commit(Content(1, layout_of(3), None, None, records))
    store.files[0].engine.inject_fault("read", after=1, error=codes.EIO)
    (damage,) = damages_in(store)
    store.files[0].engine.clear_faults()
    assert "chunk 1 cannot be read" in damage.description
    assert "EIO" in damage.description


def test_only_what_was_asked_for(store: Store) -> None:
    records = [write_chunk(store, 0, k) for k in range(2)]
    store.commit(Content(1, layout_of(1), None, None, records[:1]))
    store.add_snapshot("a")
    store.commit(Content(2, layout_of(1), None, None, records[1:]))
    flip(store, records[0].extent, 0)
    assert damages_in(store, [2]) == []
    assert [d.generations for d in damages_in(store)] == [(1,)]


def records_without_checksums(record: ChunkRecord, _: Store) -> ChunkRecord:
    return replace(record, checksums=b"")


def records_in_too_few_bytes(record: ChunkRecord, store: Store) -> ChunkRecord:
    return replace(record, extent=store.allocate(4096))


@pytest.mark.parametrize("change", [records_without_checksums, records_in_too_few_bytes])
def test_records_that_do_not_fit_their_layout(
    change: Callable[[ChunkRecord, Store], ChunkRecord], store: Store
) -> None:
    record = write_chunk(store, 0, 1)
    store.commit(Content(1, layout_of(1), None, None, [change(record, store)]))
    with pytest.raises(DamageError, match="of chunk 0 of generation 1 cannot be"):
        damages_in(store)


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
