"""Changes of the manifest, each of which is durable before it is reported, or refused."""

import errno as codes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tensorstow.base.errors import (
    CommitError,
    OptionError,
    StoreError,
    StoreFormatError,
    SyncError,
    UnlinkedError,
    advice_for,
)
from tensorstow.base.health import Health
from tensorstow.store.datafiles import sync_heads
from tensorstow.store.opening import Parts
from tensorstow.store.records import Content, Extent, Generation
from tensorstow.store.retention import droppable, dropping
from tensorstow.store.space import StoreSpace

logger = logging.getLogger("tensorstow")

_T = TypeVar("_T")
_FORKED = (
    "A store of process {} was used in its forked child: only the process that opened it may use"
    " it. Open none before the fork, or spawn."
)


class Transactions:
    """The transactions of one store, and the failure after which it refuses more."""

    def __init__(self, parts: Parts, space: StoreSpace, is_open: Callable[[], bool]) -> None:
        """Change the manifest of ``parts``, and the owners of bytes in ``space``."""
        self._files = parts.files
        self._directory = parts.files[0].path.parent
        self._manifest = parts.manifest
        self._disk = parts.disk
        self._links = parts.links
        self._space = space
        self._is_open = is_open
        self._health = Health(_FORKED.format(os.getpid()))
        self._poison: str | None = None
        self.lock = threading.RLock()
        """Held while the manifest is changed."""

    def commit(self, content: Content, extents: Sequence[Extent], keep: int | None) -> Generation:
        """Make ``content`` in ``extents`` the newest generation, durably.

        Older ones that no snapshot and no reader pins go, but for the one with number ``keep``.
        """
        self.check_sound()  # again: another thread's commit may have failed meanwhile
        # Files that were moved are found before any generation is dropped.
        self._links.check()
        # The data is durable before the transaction that refers to it: [Note: Durability].
        self._sync_files()
        created = time.time()
        older = droppable(self._manifest.summaries(), keep)
        with dropping(self._files[0], older) as gone:

            def record() -> int:
                number = self._manifest.add(content, created, gone)
                # Before `change` forgets older generations, which may have the same extents.
                self._space.extents.refer(number, extents)
                return number

            number = self.change(record, gone)
        self._shorten_log()
        generation = content.as_generation(number, created)
        try:
            self._links.check()  # the last thing: what is reported can be found
        except UnlinkedError as error:
            error.committed = generation
            raise
        return generation

    def _write_heads(self) -> None:
        """Write the new transaction's number to the data files: [Note: Heads]."""
        try:
            sync_heads(self._disk, self._files, self._manifest.head())
        except OSError as error:
            code = error.errno or codes.EIO
            message = (
                f"The heads in {', '.join(str(file.path) for file in self._files)} could not be"
                f" written ({error}), so that nothing would tell if the manifest lost what was"
                f" just written to it. Open the store again. {advice_for(code)}"
            )
            raise SyncError(message) from error

    def _sync_files(self) -> None:
        # All of them: a file that nothing was written to costs a cache flush, one that was
        # forgotten costs the run.
        for file in self._files:
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

    def change(self, act: Callable[[], _T], gone: Sequence[int] = ()) -> _T:
        """Run a transaction that drops the generations ``gone``, and free their extents."""
        try:
            result = act()
            with self._manifest.second.copying():
                self._write_heads()
            for number in gone:  # now: until here the copy may be what the store is opened by
                self._space.extents.forget(number)
        except (CommitError, StoreFormatError, OptionError):
            raise  # rolled back
        except SyncError as error:
            self._poison = str(error)
            raise
        except BaseException as error:
            # Also an interrupt: the manifest and the free extents may differ from here on.
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

    def check(self) -> None:
        """Raise ForkError in a forked child, OptionError if the store is closed."""
        self._health.check_process()
        if not self._is_open():
            message = f"The store in {self._directory} was used after it was closed."
            raise OptionError(message)

    def check_sound(self) -> None:
        """Raise SyncError too, if the disk or the manifest cannot be trusted any more."""
        self.check()
        if self._poison is not None:
            message = f"The store in {self._directory} cannot go on. {self._poison}"
            raise SyncError(message)
