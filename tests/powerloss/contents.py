"""Generations whose every byte follows from a seed, for tests of the store."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from tensorstow.store.checksums import block_checksums, weight_checksums
from tensorstow.store.records import ChunkRecord, ChunkShape, Content, Extent, StreamShape
from tensorstow.store.scrub import Damage, ScrubProgress, scrub
from tensorstow.store.store import Store

SHAPE = ChunkShape(
    elements=3000,
    block=1024,
    streams=(StreamShape(4, 32), StreamShape(2, 1), StreamShape(4, 1)),
    weight=StreamShape(2, 1),
)


def layout_of(chunks: int, shape: ChunkShape = SHAPE) -> dict[str, Any]:
    entry = json.loads(json.dumps(asdict(shape)))  # lists for tuples, as it comes back
    return {"names": ["weight"], "chunks": [entry] * chunks}


def bytes_of(shape: ChunkShape, seed: int) -> torch.Tensor:
    """Return the bytes of a chunk's extent; what is behind a stream's end is garbage too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (shape.nbytes,), dtype=torch.uint8, generator=generator)


def write_chunk(
    store: Store, chunk: int, seed: int, *, shape: ChunkShape = SHAPE, blank: bool = False
) -> ChunkRecord:
    """Write a chunk to an extent of its own; return its record."""
    extent = store.allocate(shape.nbytes)
    data = bytes_of(shape, seed)
    if blank:  # its states are never written
        tail = data[shape.weight_offset :]
        store.files[extent.file].write(tail, extent.offset + shape.weight_offset).wait()
    else:
        store.files[extent.file].write(data, extent.offset).wait()
    return ChunkRecord(
        chunk,
        extent,
        blank=blank,
        checksums=b"" if blank else block_checksums(shape, data.data_ptr()),
        weight_checksums=weight_checksums(shape, data.data_ptr() + shape.weight_offset),
    )


def make_content(store: Store, step: int, *, chunks: int = 3, extra: object = None) -> Content:
    """Write a generation's chunks and a tensor; return what to commit. The caller holds it all."""
    return Content(
        step=step,
        layout=layout_of(chunks),
        hyper=[{"lr": 1e-3 / (1 + step)}],
        extra=extra,
        chunks=[
            write_chunk(store, k, 1000 * step + k, blank=(step + k) % 5 == 0) for k in range(chunks)
        ],
        tensors=[store.write_tensor("buffer", "count", torch.full((7,), step))],
    )


def read_chunk(store: Store, extent: Extent) -> torch.Tensor:
    data = torch.empty(extent.nbytes, dtype=torch.uint8)
    store.files[extent.file].read(data, extent.offset).wait()
    return data


def release_all(store: Store, content: Content) -> None:
    for extent in content.extents():
        store.release(extent)


def commit(store: Store, step: int) -> Content:
    """Commit a generation that the caller does not hold."""
    content = make_content(store, step)
    store.commit(content)
    release_all(store, content)
    return content


def scrubbed(store: Store, numbers: Sequence[int] | None = None) -> list[ScrubProgress]:
    """Read back the generations ``numbers`` (default: all) of an open store."""
    kept = [store.load(s) for s in store.generations() if numbers is None or s.number in numbers]
    return list(scrub(store.files, kept))


def damages_in(store: Store, numbers: Sequence[int] | None = None) -> list[Damage]:
    return [damage for progress in scrubbed(store, numbers) for damage in progress.damages]
