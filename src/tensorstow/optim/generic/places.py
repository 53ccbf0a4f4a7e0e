"""Where pieces lie on disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import tensorstow._native as _native
from tensorstow.base.sizes import round_up
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File, IoFuture, accepts_direct, scratch_file
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.scratch import choose_scratch

_GROWTH = 16 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A run of bytes in one of the files."""

    file: int
    offset: int
    nbytes: int


class PieceFiles:
    """Places in scratch files without a name, one per directory, which pieces go round in turn."""

    def __init__(self, directories: Sequence[Path], expected: int, policy: PipelinePolicy) -> None:
        """Reserve ``expected`` bytes; raise DirectoryError where there is no room for them."""
        chosen = tuple(directories) or (choose_scratch(expected),)
        direct = all(accepts_direct(directory) for directory in chosen)
        self.engine: _native.Engine = open_engine(
            policy.backend if direct else "threads", depth=policy.depth, node=policy.node
        )
        self.files: list[File] = []
        share = round_up(-(-expected // len(chosen)), _GROWTH) if expected else 0
        try:
            for directory in chosen:
                self.files.append(scratch_file(self.engine, directory, share))
        except BaseException:
            self.close()
            raise
        self._ends = [0] * len(chosen)
        self._reserved = [share] * len(chosen)
        self._free: dict[int, list[Place]] = {}
        self._next_file = 0

    @property
    def file_bytes(self) -> int:
        """Return the bytes of the files that are, or were, in use."""
        return sum(self._ends)

    def take(self, nbytes: int) -> Place:
        """Return room for ``nbytes`` (whole blocks); raise DirectoryError where the disk is full.

        Room that was given back is used again where it has the very size: pieces keep theirs.
        """
        if self._free.get(nbytes):
            return self._free[nbytes].pop()
        turn = self._next_file
        end = self._ends[turn] + nbytes
        if end > self._reserved[turn]:
            reserved = round_up(end, _GROWTH)
            self.files[turn].reserve(reserved)
            self._reserved[turn] = reserved
        place = Place(turn, self._ends[turn], nbytes)
        self._ends[turn] = end
        self._next_file = (turn + 1) % len(self.files)
        return place

    def free(self, place: Place) -> None:
        """Let another piece of the same size have the room."""
        self._free.setdefault(place.nbytes, []).append(place)

    def read(self, place: Place, region: torch.Tensor) -> IoFuture:
        """Start filling ``region`` from ``place``."""
        return self.files[place.file].read(region, place.offset)

    def write(self, place: Place, region: torch.Tensor) -> IoFuture:
        """Start writing ``region`` to ``place``."""
        return self.files[place.file].write(region, place.offset)

    def close(self) -> None:
        """Wait for what is in flight and drop the files. Idempotent."""
        for file in self.files:
            file.close()
