"""Snapshots that are copied elsewhere while the run goes on."""

from concurrent.futures import Future, ThreadPoolExecutor, wait

from tensorstow.checkpoint.agreement import exchanged
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.store.remote import Remote
from tensorstow.store.remote_snapshots import push
from tensorstow.store.store import Store


class Uploads:
    """The uploads of one optimizer, one after the other, on a thread of their own."""

    def __init__(self) -> None:
        """Begin with none."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tensorstow-upload")
        self._pending: Future[object] | None = None

    def start(self, remote: Remote, name: str, store: Store, ranks: Ranks) -> None:
        """Copy a snapshot of ``store`` to ``remote``; it stays as it is while it has its name.

        Raises the error of the upload before, if that failed.
        """
        self.wait()
        generation = store.generation(name)
        if generation is None:
            return
        commit = exchanged(generation).id

        def upload() -> object:
            rank, world = ranks.rank, ranks.world
            return push(
                remote, store.files, generation, name, rank=rank, world=world, commit=commit
            )

        self._pending = self._executor.submit(upload)

    def wait(self) -> None:
        """Wait for the upload under way, if any; raise its error if it failed."""
        if self._pending is not None:
            wait([self._pending])  # an interrupt leaves it to the next call
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Wait for the upload under way, and end the thread. Idempotent."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
