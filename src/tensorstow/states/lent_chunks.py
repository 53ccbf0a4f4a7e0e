"""Chunks that steps lend: the caller updates them, and not the pipeline's kernels."""

from collections.abc import Iterable

from tensorstow.states.native_handle import NativeHandle


class LentChunks:
    """The chunks of one pipeline that a step leaves to a caller who updates (``StepKind``)."""

    def __init__(self, handle: NativeHandle, *, naive: bool) -> None:
        """Ask the pipeline of ``handle``; ``naive``: writes are waited for at a step's end."""
        self._handle = handle
        self._is_naive = naive

    def choose(self, chunks: Iterable[int]) -> None:
        """Lend these chunks from the next step on; all until then."""
        self._handle.live().set_lendable(list(chunks))

    def next(self, *, wait: bool) -> tuple[int, int] | None:
        """Return the next (chunk, slot) of the step whose states are there to be changed.

        Slot -1: memory of its own. None where the step is over or has failed, which ``end`` tells,
        or where none is there and the caller does not ``wait``; he who waits must hold no chunk
        himself.
        """
        chunk, slot = self._handle.live().next_lent(wait=wait)
        return None if chunk < 0 else (chunk, slot)

    def give_back(self, chunk: int) -> None:
        """Give a chunk back, whose memory holds the new states."""
        self._handle.live().give_back(chunk)

    def end(self) -> None:
        """Return when the step is over; raise what failed."""
        native = self._handle.live()
        self._handle.check(native.wait_published())
        if self._is_naive:
            self._handle.check(native.quiesce())
