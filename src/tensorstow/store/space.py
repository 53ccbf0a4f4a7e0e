"""Allocates extents from the data files, grows the files, and frees extents."""

import threading
from collections.abc import Iterable, Mapping, Sequence

from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.base.sizes import format_bytes
from tensorstow.io.files import GROWTH_BYTES, File, grow
from tensorstow.store.extents import Extents
from tensorstow.store.records import Extent, padded


class StoreSpace:
    """The extents of a store's files. Any thread may call any method, also during a commit."""

    def __init__(self, files: Sequence[File], generations: Mapping[int, Iterable[Extent]]) -> None:
        """Begin with ``files`` and the extents of each generation; all other bytes are free."""
        self._files = files
        self._extents = Extents([file.path.stat().st_size for file in files], generations)
        self._turn = 0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Extent:
        """Hand out a free extent; files go round. Raises DirectoryError if none can grow."""
        if nbytes < 0:
            message = f"An extent of {nbytes} bytes was requested: give 0 or more."
            raise OptionError(message)
        if nbytes == 0:
            return Extent(0, 0, 0)
        with self._lock:
            turn = self._turn
            self._turn = (turn + 1) % len(self._files)
            return self._allocate(turn, padded(nbytes))

    def adopt(self, extent: Extent) -> None:
        """Hold an extent of a generation for the caller."""
        if not extent.nbytes:
            return
        with self._lock:
            if not self._extents.is_kept(extent):
                message = f"{extent} was to be adopted, but no kept generation refers to it."
                raise OptionError(message)
            self._extents.hold([extent])

    def hold(self, extents: Iterable[Extent]) -> None:
        """Add a hold to each of ``extents``, which are in use."""
        with self._lock:
            self._extents.hold(extents)

    def release(self, extents: Iterable[Extent]) -> None:
        """End one hold of each; extents without a reference of a generation become free."""
        with self._lock:
            self._extents.release(extent for extent in extents if extent.nbytes)

    def refer(self, number: int, extents: Iterable[Extent]) -> None:
        """Record a new generation."""
        with self._lock:
            self._extents.refer(number, extents)

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the references of removed generations, and free extents that only they had."""
        with self._lock:
            for number in numbers:
                self._extents.forget(number)

    def _allocate(self, turn: int, nbytes: int) -> Extent:
        refused = []
        # A file grows before another's free room is used: drives that take turns are as quick as
        # all of them together.
        for turned in range(len(self._files)):
            file = (turn + turned) % len(self._files)
            extent = self._extents.allocate(file, nbytes)
            if extent is not None:
                return extent
            try:
                self._grow(file, nbytes)
            except DirectoryError as error:
                refused.append(f"  {error}")
                continue
            extent = self._extents.allocate(file, nbytes)
            if extent is not None:
                return extent
        asked = f"An extent of {format_bytes(nbytes)} was requested and no data file can grow:"
        raise DirectoryError("\n".join([asked, *refused]))

    def _grow(self, file: int, nbytes: int) -> None:
        size = self._extents.sizes[file]
        missing = nbytes - self._extents.free[file].trailing(size)
        self._extents.grow(file, grow(self._files[file], size, missing, GROWTH_BYTES))
