"""Allocates extents from the data files, grows the files, and frees extents."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.base.sizes import format_bytes
from tensorstow.io.files import GROWTH_BYTES, File, grow
from tensorstow.io.free_list import FreeList
from tensorstow.io.scratch import FileTurns
from tensorstow.store.records import HEADER_BYTES, PAGE, Extent, padded


class Extents:
    """Every extent of a store: held by the caller, referred to by generations, or free.

    An extent that is held or referred to is never handed out; one that is neither is free at once.
    Any thread may change them, also during a commit; who grows files or allocates holds ``lock``.
    """

    def __init__(self, sizes: Iterable[int], generations: Mapping[int, Iterable[Extent]]) -> None:
        """Begin with files of ``sizes`` bytes, and the extents of each generation by number."""
        self.lock = threading.RLock()
        self.sizes = list(sizes)
        self.free = [FreeList() for _ in self.sizes]
        self._held: Counter[Extent] = Counter()
        self._kept: dict[int, frozenset[Extent]] = {}
        self._references: Counter[Extent] = Counter()
        for number, extents in generations.items():
            self.refer(number, extents)
        self._free_the_gaps()

    def in_use(self, extent: Extent) -> bool:
        """Return whether ``extent`` is held, or a kept generation refers to it."""
        return self._held[extent] > 0 or self._references[extent] > 0

    def is_kept(self, extent: Extent) -> bool:
        """Return whether a kept generation refers to ``extent``."""
        return self._references[extent] > 0

    def grow(self, file: int, size: int) -> None:
        """Record that ``file`` now has ``size`` bytes."""
        if size > self.sizes[file]:
            self.free[file].add(self.sizes[file], size)
            self.sizes[file] = size

    def allocate(self, file: int, nbytes: int) -> Extent | None:
        """Allocate free bytes of ``file``, held by the caller; None if there are too few."""
        # The caller, `StoreSpace`, holds the lock.
        start = self.free[file].allocate(nbytes)
        if start is None:
            return None
        extent = Extent(file, start, nbytes)
        self._held[extent] += 1
        return extent

    def hold(self, extents: Iterable[Extent]) -> None:
        """Add a hold to each of ``extents``; all must be in use, else none gets one."""
        wanted = list(extents)
        with self.lock:
            for extent in wanted:
                if not self.in_use(extent):
                    message = (
                        f"{extent} was named but nobody holds it and no generation refers to it:"
                        " its bytes may have been reallocated. Name extents that were allocated or"
                        " adopted."
                    )
                    raise OptionError(message)
            self._held.update(wanted)

    def adopt(self, extent: Extent) -> None:
        """Hold an extent of a kept generation for the caller."""
        if not extent.nbytes:
            return
        with self.lock:
            if not self.is_kept(extent):
                message = f"{extent} was to be adopted, but no kept generation refers to it."
                raise OptionError(message)
            self._held[extent] += 1

    def release(self, extents: Iterable[Extent]) -> None:
        """End one hold of each of ``extents``; those that no generation refers to become free."""
        with self.lock:
            for extent in extents:
                if not extent.nbytes:
                    continue
                if self._held[extent] < 1:
                    message = f"{extent} was to be released, but the caller does not hold it."
                    raise OptionError(message)
                self._drop(self._held, extent)

    def refer(self, number: int, extents: Iterable[Extent]) -> None:
        """Record generation ``number`` with its ``extents``, which are in use."""
        with self.lock:
            self._kept[number] = frozenset(extents)
            self._references.update(self._kept[number])

    def forget(self, number: int) -> None:
        """Drop the references of generation ``number``, and free extents that only it had."""
        with self.lock:
            for extent in self._kept.pop(number):
                self._drop(self._references, extent)

    def _drop(self, counts: "Counter[Extent]", extent: Extent) -> None:
        counts[extent] -= 1
        if not counts[extent]:
            del counts[extent]
        if not self.in_use(extent):
            self.free[extent.file].add(extent.offset, extent.end)

    def _free_the_gaps(self) -> None:
        ends = [HEADER_BYTES] * len(self.sizes)
        for extent in sorted(self._references, key=attrgetter("file", "offset")):
            if extent.offset > ends[extent.file]:
                self.free[extent.file].add(ends[extent.file], extent.offset)
            ends[extent.file] = max(ends[extent.file], extent.end)
        for file, end in enumerate(ends):
            # A file that lost its end keeps its damage: free bytes begin after the last referenced
            # one.
            size, self.sizes[file] = self.sizes[file] // PAGE * PAGE, end
            self.grow(file, size)


class StoreSpace:
    """The extents of a store's files, which grow. Any thread may allocate, also in a commit."""

    def __init__(
        self,
        files: Sequence[File],
        generations: Mapping[int, Iterable[Extent]],
        shares: Sequence[float] | None = None,
    ) -> None:
        """Begin with ``files`` and the extents of each generation; all other bytes are free.

        ``shares``: of the bytes of new extents, by file; None: equal ones.
        """
        self._files = files
        self.extents = Extents([file.path.stat().st_size for file in files], generations)
        self._turns = FileTurns(shares or [1.0] * len(files))

    def allocate(self, nbytes: int) -> Extent:
        """Hand out a free extent, of the file whose turn it is, or of another if that is full.

        Raises DirectoryError if none can grow.
        """
        if nbytes < 0:
            message = f"An extent of {nbytes} bytes was requested: give 0 or more."
            raise OptionError(message)
        if nbytes == 0:
            return Extent(0, 0, 0)
        with self.extents.lock:
            return self._allocate(self._turns.next(padded(nbytes)), padded(nbytes))

    def _allocate(self, turn: int, nbytes: int) -> Extent:
        refused = []
        # A file grows before another's free room is used: drives that take turns are as quick as
        # all of them together.
        for turned in range(len(self._files)):
            file = (turn + turned) % len(self._files)
            extent = self.extents.allocate(file, nbytes)
            if extent is not None:
                return extent
            try:
                self._grow(file, nbytes)
            except DirectoryError as error:
                refused.append(f"  {error}")
                continue
            extent = self.extents.allocate(file, nbytes)
            if extent is not None:
                return extent
        asked = f"An extent of {format_bytes(nbytes)} was requested and no data file can grow:"
        raise DirectoryError("\n".join([asked, *refused]))

    def _grow(self, file: int, nbytes: int) -> None:
        size = self.extents.sizes[file]
        # Free bytes at the end of the file become a part of the extent.
        missing = nbytes - self.extents.free[file].trailing(size)
        self.extents.grow(file, grow(self._files[file], size, missing, GROWTH_BYTES))
