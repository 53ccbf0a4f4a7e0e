"""``Store``: writes to free extents, and commits them as a generation."""

import errno as codes
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import torch

import tensorstow._native as _native
from tensorstow.base.errors import (
    CommitError,
    ForkError,
    OptionError,
    StoreError,
    StoreFormatError,
    SyncError,
    UnlinkedError,
    advice_for,
    named,
)
from tensorstow.io.files import File
from tensorstow.store.durability import Disk, SystemDisk
from tensorstow.store.heads import sync_heads
from tensorstow.store.opening import Parts, open_parts
from tensorstow.store.records import Content, Extent, Generation, Summary, TensorRecord
from tensorstow.store.retention import check_name, droppable, find
from tensorstow.store.space import StoreSpace
from tensorstow.store.tensors import copy_bytes, read_tensor, tensor_bytes, write_tensor

logger = logging.getLogger("tensorstow")

_T = TypeVar("_T")


class Store:
    """Data files in one or more directories and the manifest of what in them is whole.

    [Note: Two extents] A caller writes only to extents that it allocated and that no generation
    refers to, so the last generation stays whole whatever happens. A commit replaces it, and then
    its extents are free to be written. `allocate`, `adopt` and `release` may be called while
    `commit` runs on another thread.

    [Note: Going back] Resuming from a snapshot deletes nothing. A commit drops every older
    generation that no snapshot pins, so the newer ones of the abandoned course go at the next
    commit and not before: a run that dies until then has lost nothing.
    """

    def __init__(self, parts: Parts) -> None:
        """Take what was opened; `open` is the way to make one."""
        self.files: tuple[File, ...] = parts.files
        """One per directory, in the order of the directories. Extent.file is the place in here."""
        self._manifest = parts.manifest
        self._disk = parts.disk
        self._links = parts.links
        self._space = StoreSpace(parts.files, parts.manifest.extents())
        self._commits = threading.RLock()
        """Held by whoever changes the manifest."""
        self._poison: str | None = None
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _release, parts.resources, self._owner)

    @classmethod
    def open(
        cls, directories: Sequence[Path], engine: _native.Engine, *, disk: Disk | None = None
    ) -> Self:
        """Open the store in ``directories``, which exist, or make one there.

        The manifest is in the first. Raises LockedError where the store is in use, DirectoryError
        where a directory cannot hold one, StoreFormatError where other things are in it,
        DamageError where a data file's header is damaged.
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

        Raises DirectoryError where no directory has room.
        """
        self._check_sound()
        return self._space.allocate(nbytes)

    def adopt(self, extent: Extent) -> None:
        """Hold an extent of a kept generation, as if it had been allocated (to resume)."""
        self._check()
        self._space.adopt(extent)

    def release(self, extent: Extent) -> None:
        """End the caller's hold; the extent is free once no generation refers to it either."""
        self._check()
        self._space.release([extent])

    def commit(self, content: Content, *, keep: int | None = None) -> Generation:
        """Make ``content``, all of which has been written, the newest generation, durably.

        Older generations that no snapshot pins are dropped, but for the one with number ``keep``:
        ranks that must agree keep what they go on from until all have committed, and then call
        `drop_older`. Raises CommitError where nothing happened, SyncError where the disk cannot be
        trusted any more, UnlinkedError where the files are not where the run says.
        """
        self._check_sound()
        extents = content.extents()
        self._space.hold(extents)  # a release meanwhile must not free them
        try:
            with self._commits:
                return self._commit(content, extents, keep)
        finally:
            self._space.release(extents)

    def drop_older(self) -> None:
        """Drop unpinned generations but the newest one."""
        self._check_sound()
        with self._commits:
            gone = droppable(self._manifest.summaries()[:-1])
            self._change(lambda: self._manifest.drop(gone), gone)

    def discard(self, number: int) -> None:
        """Drop a generation that no snapshot pins, the newest one too: other ranks have it not."""
        self._check_sound()
        with self._commits:
            gone = droppable([find(self._manifest.summaries(), number)])
            self._change(lambda: self._manifest.drop(gone), gone)

    def generation(self, which: str | int | None = None) -> Generation | None:
        """Return a generation by snapshot's name or number; without one the newest.

        None where nothing was ever committed and none was named. Raises OptionError for one that
        is not there.
        """
        self._check()
        with self._manifest.lock:  # not that of commits: nobody waits for a disk to look
            kept = self._manifest.summaries()
            if which is None and not kept:
                return None
            return self._manifest.load(kept[-1] if which is None else find(kept, which))

    def load(self, summary: Summary) -> Generation:
        """Return all of the generation that ``summary`` is of."""
        self._check()
        with self._manifest.lock:
            return self._manifest.load(find(self._manifest.summaries(), summary.number))

    def generations(self) -> list[Summary]:
        """Return all kept generations, oldest first."""
        self._check()
        return self._manifest.summaries()

    def snapshots(self) -> list[Summary]:
        """Return the kept generations that have a name, oldest first."""
        return [summary for summary in self.generations() if summary.names]

    def add_snapshot(self, name: str, number: int | None = None) -> Summary:
        """Name a generation (the newest): it is kept until `drop_snapshot`. Copies nothing."""
        self._check_sound()
        with self._commits:
            self._links.check()
            summary = check_name(self._manifest.summaries(), name, number)
            self._change(lambda: self._manifest.add_snapshot(name, summary.number))
            self._links.check()
        return replace(summary, names=tuple(sorted((*summary.names, name))))

    def drop_snapshot(self, name: str) -> None:
        """Drop a snapshot; its generation goes with its last name, unless it is the newest."""
        self._check_sound()
        with self._commits:
            kept = self._manifest.summaries()
            summary = find(kept, name)
            gone = [] if len(summary.names) > 1 or summary == kept[-1] else [summary.number]
            self._change(lambda: self._manifest.drop_snapshot(name, gone), gone)

    def copy(self, other: "Store", content: Content) -> Content:
        """Copy what ``content`` refers to in ``other`` to extents here, which the caller holds.

        Memory: two pieces. Nothing is durable before a commit of what is returned.
        """
        self._check_sound()
        moved: dict[Extent, Extent] = {}
        try:
            for extent in content.extents():
                moved[extent] = target = self.allocate(extent.nbytes)
                copy_bytes(other.files[extent.file], extent, self.files[target.file], target.offset)
        except BaseException:
            self._space.release(moved.values())
            raise
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
        """Read a tensor back; raise DamageError where it is not what was written."""
        self._check()
        return read_tensor(self.files[record.extent.file], record)

    def close(self) -> None:
        """Wait for transfers, close the files, give up the lock. Idempotent.

        A forked child has nothing to close.
        """
        with self._commits:
            self._finalizer()

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def _commit(self, content: Content, extents: Sequence[Extent], keep: int | None) -> Generation:
        self._check_sound()  # again: another thread's commit may have failed meanwhile
        self._links.check()
        gone = droppable(self._manifest.summaries(), keep)
        self._sync_files()
        created = time.time()

        def record() -> int:
            number = self._manifest.add(content, created, gone)
            self._space.refer(number, extents)
            return number

        number = self._change(record, gone)
        self._shorten_log()
        generation = Generation(
            step=content.step,
            layout=content.layout,
            hyper=content.hyper,
            extra=content.extra,
            chunks=tuple(content.chunks),
            tensors=tuple(content.tensors),
            number=number,
            created=created,
        )
        try:
            self._links.check()  # the last thing: what is reported can be found
        except UnlinkedError as error:
            error.committed = generation
            raise
        return generation

    def _write_heads(self) -> None:
        """Let the data files know of the transaction that was just made: [Note: Heads]."""
        try:
            sync_heads(self._disk, self.files, self._manifest.head())
        except OSError as error:
            code = error.errno or codes.EIO
            self._poison = (
                f"The heads in {', '.join(str(file.path) for file in self.files)} could not be"
                f" written ({error}), so that nothing would tell if the manifest lost what was"
                f" just written to it. Open the store again. {advice_for(code)}"
            )
            raise SyncError(self._poison) from error

    def _sync_files(self) -> None:
        # All of them: a file that nothing was written to costs a cache flush, one that was
        # forgotten costs the run.
        for file in self.files:
            try:
                self._disk.sync_file(file)
            except OSError as error:
                code = error.errno or codes.EIO
                # The kernel drops what it could not write and calls the next sync a success.
                self._poison = (
                    f"fdatasync of {file.path} failed ({os.strerror(code)}), so that writes may be"
                    f" lost. The last commit is whole: resume from it. {advice_for(code)}"
                )
                raise SyncError(self._poison) from error

    def _change(self, act: Callable[[], _T], gone: Sequence[int] = ()) -> _T:
        """Run a transaction that drops the generations ``gone``, and free what was theirs."""
        try:
            result = act()
            self._space.forget(gone)
            self._write_heads()
        except (CommitError, StoreFormatError, OptionError):
            raise  # rolled back
        except SyncError as error:
            self._poison = str(error)
            raise
        except BaseException as error:
            # Also an interrupt: what is free and what the manifest says may differ from here on.
            self._poison = f"The last transaction ended in {error!r}. Open the store again."
            raise
        return result

    def _shorten_log(self) -> None:
        try:
            self._manifest.checkpoint()
        except SyncError as error:
            self._poison = str(error)  # this commit is durable all the same; the next is refused
        except StoreError as error:
            logger.warning("the manifest's log could not be shortened for now: %s", error)

    def _check(self) -> None:
        if self._owner != os.getpid():
            message = (
                f"A store of process {self._owner} was used in its forked child {os.getpid()}: only"
                " the process that opened it may use it. Open none before the fork, or spawn."
            )
            raise ForkError(message)
        if not self._finalizer.alive:
            message = f"The store in {self.directories[0]} was used after it was closed."
            raise OptionError(message)

    def _check_sound(self) -> None:
        self._check()
        if self._poison is not None:
            message = f"The store in {self.directories[0]} cannot go on. {self._poison}"
            raise SyncError(message)


def _release(resources: ExitStack, owner: int) -> None:
    if owner == os.getpid():  # a child has closed what it must (see `at_fork`) and may not the rest
        resources.close()
