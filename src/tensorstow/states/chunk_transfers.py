"""Reads and writes of single chunks on disk through the ring, outside steps."""

from collections.abc import Callable, Iterator, Sequence

import torch

from tensorstow.io.files import IoFuture
from tensorstow.states.chunks import Chunk, ChunkRing
from tensorstow.states.layout import parts_of
from tensorstow.states.scratch import ScratchStorage
from tensorstow.states.stored import StoreStorage
from tensorstow.states.stored_chunks import StoredChunks

Transferring = Callable[[torch.Tensor, int], IoFuture]
ChunkStorage = ScratchStorage | StoreStorage


class ChunkTransfers:
    """Reads and writes chunks through the first slot of the ring."""

    def __init__(self, stored: StoredChunks, storage: ChunkStorage) -> None:
        """Move chunks at the positions in ``stored``, in the files of ``storage``."""
        self._stored = stored
        self._storage = storage

    def in_memory(
        self, chunks: Sequence[Chunk], ring: ChunkRing
    ) -> Iterator[tuple[Chunk, Sequence[torch.Tensor]]]:
        """Yield each chunk's streams in memory, valid until the next iteration."""
        for chunk in chunks:
            if chunk.resident and self._stored.state(chunk) == "resident":
                yield chunk, chunk.resident
                continue
            streams = ring.streams(chunk, 0)
            if self._stored.state(chunk) == "blank":
                for stream in streams:
                    stream.zero_()
            else:
                self.load(chunk, ring)
                self._stored.check_intact(chunk, streams)
            yield chunk, streams

    def load(self, chunk: Chunk, ring: ChunkRing) -> None:
        """Read a chunk's streams into the ring's first slot."""
        number, offset = self._stored.place(chunk)
        _move(chunk, ring, self._storage.file(number).read, offset)

    def save(self, chunk: Chunk, ring: ChunkRing) -> None:
        """Write the ring's first slot to the place of the chunk's next write."""
        number, offset = self._stored.target_of(chunk)
        _move(chunk, ring, self._storage.file(number).write, offset)


def _move(chunk: Chunk, ring: ChunkRing, start: Transferring, offset: int) -> None:
    parts = parts_of(chunk.family, chunk.plan.elements)[:-1]
    views = ring.parts(chunk, 0)
    futures = [start(v, offset + p.file_at) for v, p in zip(views, parts, strict=False)]
    for future in futures:
        future.wait()
