"""``Store``: writes to free extents, and commits them as a generation."""

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch

import tensorstow._native as _native
from tensorstow.base.errors import named
from tensorstow.base.profile import drive_shares
from tensorstow.io.files import File
from tensorstow.store.bounds import check_inside
from tensorstow.store.durability import SystemDisk
from tensorstow.store.manifest import Manifest
from tensorstow.store.opening import Parts, open_parts
from tensorstow.store.records import Content, Extent, Generation, Summary, TensorRecord
from tensorstow.store.retention import check_name, droppable, dropping, find
from tensorstow.store.space import StoreSpace
from tensorstow.store.tensors import copy_bytes, read_tensor, tensor_bytes, write_tensor
from tensorstow.store.transactions import Transactions


class Store:
    """Data files in one or more directories, and the manifest of the generations in them.

    [Note: Two extents] A caller writes only to extents that it allocated and that no generation
    refers to, so the last generation stays intact until a commit replaces it; then its extents are
    free. `allocate`, `adopt` and `release` may be called while
    `commit` runs on another thread.

    [Note: Going back] Resuming from a snapshot deletes nothing. A commit drops every older
    generation that no snapshot pins, so the newer ones, which were abandoned, go at the next
    commit and not before: a run that dies until then has lost nothing.
    """

    def __init__(self, parts: Parts) -> None:
        """Use the opened parts; `open` is the constructor for callers."""
        self.files: tuple[File, ...] = parts.files
        """One per directory, in the order of the directories. Extent.file is the place in here."""
        self._manifest = parts.manifest
        self._links = parts.links
        shares = drive_shares([file.path.parent for file in parts.files])
        self._space = StoreSpace(parts.files, parts.manifest.extents(), shares)
        self._finalizer = closing = weakref.finalize(self, _release, parts.resources, os.getpid())
        # A lambda that refers to the store would make a cycle, and delay the release of its lock.
        self._transactions = Transactions(parts, self._space, lambda: closing.alive)

    @classmethod
    def open(
        cls, directories: Sequence[Path], engine: _native.Engine, *, disk: SystemDisk | None = None
    ) -> Self:
        """Open the store in ``directories``, which exist, or create one there.

        The manifest is in the first. Raises LockedError if the store is in use, DirectoryError
        if a directory cannot hold one, StoreFormatError if other things are in it, DamageError if
        a data file's header is damaged.
        """
        parts = open_parts(directories, engine, disk or SystemDisk())
        try:
            with named("The store in", parts.files[0].path.parent):
                return cls(parts)
        except BaseException:
            parts.resources.close()
            raise

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where the data files are; the manifest is in the first."""
        return tuple(file.path.parent for file in self.files)

    def allocate(self, nbytes: int) -> Extent:
        """Return a free extent of at least ``nbytes``, the caller's until `release`.

        Raises DirectoryError if no directory has room.
        """
        self._transactions.check_sound()
        return self._space.allocate(nbytes)

    def adopt(self, extent: Extent) -> None:
        """Hold an extent of a kept generation, as if it had been allocated (to resume)."""
        self._transactions.check()
        self._space.extents.adopt(extent)

    def release(self, extent: Extent) -> None:
        """End the caller's hold; the extent is free once no generation refers to it either."""
        self._transactions.check()
        self._space.extents.release([extent])

    def commit(self, content: Content, *, keep: int | None = None) -> Generation:
        """Make ``content``, all of which has been written, the newest generation, durably.

        Older generations that no snapshot pins are dropped, but for the one with number ``keep``:
        ranks keep the generation they resumed from until all have committed, and then call
        `drop_older`. Raises CommitError if nothing was changed, SyncError if durability is unknown,
        UnlinkedError if the open files are no longer those at their paths.
        """
        self._transactions.check_sound()
        extents = content.extents()
        self._space.extents.hold(extents)  # a release meanwhile must not free them
        try:
            with self._transactions.lock:
                return self._transactions.commit(content, extents, keep)
        finally:
            self._space.extents.release(extents)

    def drop_older(self) -> None:
        """Drop unpinned generations but the newest one."""
        self._transactions.check_sound()
        with self._transactions.lock:
            older = droppable(self._manifest.summaries()[:-1])
            with dropping(self.files[0], older) as gone:
                self._transactions.change(lambda: self._manifest.drop(gone), gone)

    def generation(self, which: str | int | None = None) -> Generation | None:
        """Return a generation by snapshot's name or number; without one the newest.

        None if nothing was ever committed and none was named. Raises OptionError if it does not
        exist, DamageError if its bytes or records are damaged.
        """
        self._transactions.check()
        with self._manifest.lock:  # not that of commits: a query does not wait for the disk
            summaries = self._manifest.summaries()
            if which is None and not summaries:
                return None
            return _load(
                self.files,
                self._manifest,
                summaries[-1] if which is None else find(summaries, which),
            )

    def load(self, summary: Summary) -> Generation:
        """Return all of the generation that ``summary`` is of."""
        self._transactions.check()
        with self._manifest.lock:
            # Looked up again, because it may have been dropped or named since.
            return _load(
                self.files, self._manifest, find(self._manifest.summaries(), summary.number)
            )

    def generations(self) -> list[Summary]:
        """Return all kept generations, oldest first."""
        self._transactions.check()
        return self._manifest.summaries()

    def add_snapshot(self, name: str, number: int | None = None) -> Summary:
        """Name a generation (the newest): it is kept until `drop_snapshot`. Copies nothing."""
        self._transactions.check_sound()
        with self._transactions.lock:
            self._links.check()
            summary = check_name(self._manifest.summaries(), name, number)
            self._transactions.change(lambda: self._manifest.add_snapshot(name, summary.number))
            self._links.check()
        return replace(summary, names=tuple(sorted((*summary.names, name))))

    def drop_snapshot(self, name: str) -> None:
        """Drop a snapshot, and its generation if that has no other name and is not the newest.

        A generation that another process reads goes with the first commit after that.
        """
        self._transactions.check_sound()
        with self._transactions.lock:
            summaries = self._manifest.summaries()
            summary = find(summaries, name)
            stays = len(summary.names) > 1 or summary == summaries[-1]
            with dropping(self.files[0], [] if stays else [summary.number]) as gone:
                self._transactions.change(lambda: self._manifest.drop_snapshot(name, gone), gone)

    def copy(self, other: "Store", content: Content) -> Content:
        """Copy the extents of ``content`` in ``other`` to extents here, which the caller holds.

        Memory: two pieces. Nothing is durable before a commit of what is returned.
        """
        self._transactions.check_sound()
        moved: dict[Extent, Extent] = {}
        try:
            for extent in content.extents():
                moved[extent] = target = self.allocate(extent.nbytes)
                copy_bytes(other.files[extent.file], extent, self.files[target.file], target.offset)
        except BaseException:
            self._space.extents.release(moved.values())
            raise
        # Extents of no bytes were not copied, and stay.
        chunks = [replace(c, extent=moved.get(c.extent, c.extent)) for c in content.chunks]
        tensors = [replace(t, extent=moved.get(t.extent, t.extent)) for t in content.tensors]
        return replace(content, chunks=chunks, tensors=tensors)

    def write_tensor(self, kind: str, name: str, tensor: torch.Tensor) -> TensorRecord:
        """Write ``tensor`` to an extent of its own; the record is for a commit.

        The caller holds the extent.
        """
        extent = self.allocate(tensor_bytes(tensor))
        try:
            checksum = write_tensor(self.files[extent.file], extent.offset, tensor)
        except BaseException:
            self.release(extent)
            raise
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorRecord(kind, name, dtype, tuple(tensor.shape), extent, checksum)

    def read_tensor(self, record: TensorRecord) -> torch.Tensor:
        """Read a tensor back; raise DamageError if its checksum differs."""
        self._transactions.check()
        return read_tensor(self.files[record.extent.file], record)

    def close(self) -> None:
        """Wait for transfers, close the files, give up the lock. Idempotent.

        A forked child has nothing to close.
        """
        with self._transactions.lock:
            # A commit of another thread ends first.
            self._finalizer()

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()


def _load(files: Sequence[File], manifest: Manifest, summary: Summary) -> Generation:
    generation = manifest.load(summary)
    with named("The store in", files[0].path.parent):
        sizes = [os.fstat(file.fd).st_size for file in files]
    check_inside(generation, sizes)
    return generation


def _release(resources: ExitStack, owner: int) -> None:
    if owner == os.getpid():  # a child has closed what it must (see `at_fork`) and may not the rest
        resources.close()
