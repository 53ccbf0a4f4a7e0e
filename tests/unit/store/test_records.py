"""How a chunk lies in its extent, and layouts that cannot be read."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from tensorstow.base.errors import StoreFormatError
from tensorstow.store.records import (
    ChunkRecord,
    ChunkShape,
    Content,
    Extent,
    StreamShape,
    TensorRecord,
    chunk_shapes,
    padded,
)

SHAPE = ChunkShape(
    elements=5000,
    block=1024,
    streams=(StreamShape(2, 1), StreamShape(4, 32)),
    weight=StreamShape(2, 1),
)


def test_padding_is_to_whole_pages() -> None:
    assert [padded(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_streams_lie_one_after_the_other() -> None:
    assert StreamShape(4, 32).span(5000) == 4 * 157
    assert SHAPE.weight_offset == 12288 + 4096
    assert SHAPE.nbytes == SHAPE.weight_offset + 12288
    assert SHAPE.blocks == 5


def test_a_layout_survives_json() -> None:
    layout = json.loads(json.dumps({"chunks": [asdict(SHAPE)], "mine": 1}))
    assert chunk_shapes(layout) == (SHAPE,)


@pytest.mark.parametrize(
    "chunks",
    [
        None,
        [{}],
        [asdict(SHAPE) | {"block": 0}],
        [asdict(SHAPE) | {"block": 48}],
        [asdict(SHAPE) | {"weight": {"bytes": 1, "per": 0}}],
        [asdict(SHAPE) | {"elements": -1}],
        [asdict(SHAPE) | {"streams": [3]}],
    ],
)
def test_layouts_that_cannot_be_read(chunks: Any) -> None:  # noqa: ANN401  # anything
    with pytest.raises(StoreFormatError, match="layout's chunks cannot be read"):
        chunk_shapes({"chunks": chunks})


def test_extents_of_nothing_are_not_counted() -> None:
    chunk = ChunkRecord(0, Extent(0, 4096, 4096), blank=True, checksums=b"", weight_checksums=b"")
    tensor = TensorRecord("extra", "none", "float32", (0,), Extent(0, 0, 0), 0)
    assert Content(1, {}, None, None, [chunk], [tensor]).extents() == [chunk.extent]
    assert chunk.extent.end == 8192
