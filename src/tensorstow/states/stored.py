"""Disk space of chunks in a store: two extents each, so that a commit stays whole."""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

import tensorstow._native as _native
from tensorstow.base.directories import make_directories
from tensorstow.base.errors import LockedError, OptionError
from tensorstow.io.files import File
from tensorstow.states.policy import PipelinePolicy, engine_for
from tensorstow.states.stored_chunks import FilePosition
from tensorstow.store.records import Extent
from tensorstow.store.store import Store


class StoreStorage:
    """The files of a store, by their numbers in the I/O engine."""

    durable = True

    def __init__(self, directories: Sequence[Path], policy: PipelinePolicy) -> None:
        """Open or create the store in ``directories``; it is locked until ``close``."""
        if not directories:
            message = (
                'durability="commit" was requested without dir=: name the directory from which the'
                " run is to be resumed."
            )
            raise OptionError(message)
        make_directories(directories)
        self.engine: _native.Engine | None = engine_for(directories, policy)
        self.store = _open_store(directories, self.engine)
        self._numbers = [file.number for file in self.store.files]
        self._extents: dict[FilePosition, Extent] = {}

    def open_engine(self) -> _native.Engine:
        """Return the engine."""
        if self.engine is None:
            message = "The store was closed."
            raise OptionError(message)
        return self.engine

    def reserve(self, widths: Sequence[int]) -> list[FilePosition]:
        """Return a free extent for each of ``widths`` bytes; all or none."""
        places: list[FilePosition] = []
        try:
            # extend() takes one extent at a time: if one is refused, the list has those before it.
            places.extend(self._hold(self.store.allocate(width)) for width in widths)
        except BaseException:
            for place in places:
                self.release(place)
            raise
        return places

    def adopt(self, extent: Extent) -> FilePosition:
        """Hold an extent of a committed generation."""
        self.store.adopt(extent)
        return self._hold(extent)

    def release(self, place: FilePosition) -> None:
        """End the hold on an extent."""
        self.store.release(self._extents.pop(place))

    def release_all(self) -> None:
        """End all holds: others are adopted next."""
        for place in list(self._extents):
            self.release(place)

    def extent(self, place: FilePosition) -> Extent:
        """Return the extent that begins at ``place``."""
        return self._extents[place]

    def file(self, number: int) -> File:
        """Return the file that the engine calls ``number``."""
        return self.store.files[self._numbers.index(number)]

    def path(self, number: int) -> Path:
        """Return the path of that file, for messages."""
        return self.file(number).path if number in self._numbers else Path("(no file)")

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories of the files."""
        return self.store.directories

    def close(self) -> None:
        """Release the store. Idempotent."""
        self.store.close()
        self.engine = None

    def _hold(self, extent: Extent) -> FilePosition:
        place = (self._numbers[extent.file], extent.offset)
        self._extents[place] = extent
        return place


def _open_store(directories: Sequence[Path], engine: _native.Engine) -> Store:
    """Open the store; explain in the error if ranks without a process group share a directory."""
    try:
        return Store.open(directories, engine)
    except LockedError as error:
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            raise
        rank = dist.get_rank()
        message = (
            f"{error} This is rank {rank} of {dist.get_world_size()}: ranks that all have the whole"
            " parameters (DistributedDataParallel) each keep a run of their own, so waiting does"
            f' not help. Give each its directory, dir=f"{directories[0]}/{{rank}}"; or shard the'
            " model by tensorstow.stow() or fully_shard, whose ranks share one."
        )
        raise LockedError(message) from error
