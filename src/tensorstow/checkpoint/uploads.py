"""Snapshots that are copied elsewhere while the run goes on."""

import logging
import shlex
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.agreement import exchanged
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.checkpoint.worlds import Worlds
from tensorstow.store.remote import Remote
from tensorstow.store.remote_snapshots import push
from tensorstow.store.store import Store
from tensorstow.store.upload_notes import read_notes, remove_note, write_note

logger = logging.getLogger("tensorstow")


class Uploads:
    """The uploads of one optimizer, one after the other, on a thread of their own."""

    def __init__(self) -> None:
        """Begin with none."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tensorstow-upload")
        self._pending: dict[str, Future[object]] = {}
        """The uploads that were not waited for, by the names of their snapshots."""

    def start(self, remote: Remote, name: str, store: Store, ranks: Ranks) -> None:
        """Copy a snapshot of ``store`` to ``remote``; it stays as it is while it has its name.

        A note of it is removed when the copy is complete.
        """
        generation = store.generation(name)
        if generation is None:
            return
        commit = exchanged(generation).id

        def upload() -> None:
            rank, world = ranks.rank, ranks.world
            push(remote, store.files, generation, name, rank=rank, world=world, commit=commit)
            remove_note(store.directories[0], name)

        self._pending[name] = self._executor.submit(upload)

    def go_on(self, store: Store, ranks: Ranks) -> None:
        """Start the uploads that an earlier process did not complete, by its notes."""
        directory = store.directories[0]
        names = {name for summary in store.generations() for name in summary.names}
        for name, url in read_notes(directory).items():
            if name in self._pending:
                continue
            if name not in names:
                logger.warning(
                    "snapshot %r was to be copied to %s, and it is not there any more", name, url
                )
                remove_note(directory, name)
                continue
            try:
                remote = Remote(url)
            except OptionError as error:
                command = f"tensorstow run push {directory} {shlex.quote(url)} --snapshot {name}"
                logger.warning("snapshot %r was not copied: %s Then: %s", name, error, command)
                continue
            logger.warning(
                "the copy of snapshot %r to %s was not complete when the last process ended: it"
                " goes on now",
                name,
                url,
            )
            self.start(remote, name, store, ranks)

    def wait(self) -> None:
        """Wait for the uploads under way, if any; raise the error of the first that failed."""
        wait(self._pending.values())  # an interrupt leaves them to the next call
        pending, self._pending = self._pending, {}
        errors = [error for future in pending.values() if (error := future.exception())]
        for error in errors[1:]:
            logger.error("another copy of a snapshot failed: %s", error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for the uploads under way, and end the thread. Idempotent."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()


@contextmanager
def noted(name: str, remote: Remote, store: Store, ranks: Ranks) -> Iterator[None]:
    """Note a copy of the snapshot that the block makes; remove the note if that fails."""
    directory = store.directories[0]
    is_new = all(name not in summary.names for summary in store.generations())
    if is_new:  # else the block raises an error, and an earlier note stays
        with ranks.reporting_errors(f"snapshot({name!r})"):
            write_note(directory, name, remote.url)
    try:
        yield
    # An interrupt leaves the note: whether the snapshot was made is not known then.
    except Exception:
        if is_new:
            remove_note(directory, name)
        raise


def log_unsent(worlds: Worlds) -> None:
    """Log which copies the run of another number of ranks did not complete."""
    for world in worlds.rest:
        unsent = {item for path in world.paths.values() for item in read_notes(path).items()}
        for name, url in sorted(unsent):
            logger.warning(
                "the copy of snapshot %r to %s was not complete when the run of %d ranks ended:"
                " tensorstow run push %s %s --snapshot %s",
                name,
                url,
                world.size,
                worlds.base,
                shlex.quote(url),
                name,
            )
