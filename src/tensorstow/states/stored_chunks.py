"""Places of chunks on disk in the native pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorstow.states.chunks import Chunk
from tensorstow.states.native_handle import NativeHandle

FilePosition = tuple[int, int]
"""The engine's number of a file, and the byte in it; NOWHERE before the first write."""
NOWHERE: FilePosition = (-1, 0)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """The place of a chunk on disk, and its checksums."""

    place: FilePosition = NOWHERE
    blank: bool = True
    checksums: bytes = b""
    """Checksums of its states, a u32 for each block."""
    weight_checksums: bytes = b""
    """Checksums of the stored weights; empty if those are out of date."""


class StoredChunks:
    """The place of each chunk's bytes on disk, and whether they are current."""

    def __init__(self, handle: NativeHandle) -> None:
        """Use the pipeline of ``handle``."""
        self._handle = handle

    def state(self, chunk: Chunk) -> str:
        """Return the chunk's state: resident, blank, stored, ... (csrc/pipeline/chunk.h)."""
        return self._handle.live().state(chunk.number)

    def place(self, chunk: Chunk) -> FilePosition:
        """Return where the chunk's states were last written."""
        file, offset = self._handle.live().place(chunk.number)
        return file, offset

    def target(self, chunk: Chunk, place: FilePosition) -> None:
        """Set the position of the chunk's next write."""
        self._handle.live().set_target(chunk.number, *place)

    def target_of(self, chunk: Chunk) -> FilePosition:
        """Return where the chunk is written next."""
        file, offset = self._handle.live().target(chunk.number)
        return file, offset

    def spare(self, chunk: Chunk, place: FilePosition) -> None:
        """Set a second position, where updates write to that may be undone."""
        self._handle.live().set_spare(chunk.number, *place)

    def captured(self, chunk: Chunk) -> bool:
        """Return whether the chunk's place holds its current states and weights."""
        return self._handle.live().captured(chunk.number)

    def rewritten(self, chunk: Chunk, streams: Sequence[torch.Tensor]) -> None:
        """Record that ``streams`` were put into the chunk's memory, or written to its target."""
        self._handle.live().rewritten(chunk.number, [s.data_ptr() for s in streams])

    def check_intact(self, chunk: Chunk, streams: Sequence[torch.Tensor]) -> None:
        """Raise DamageError unless ``streams`` match the checksums of the last write."""
        if not self._handle.live().intact(chunk.number, [s.data_ptr() for s in streams]):
            file, offset = self.place(chunk)
            raise self._handle.damage(file, offset, chunk.file_bytes)
