"""Chunks that the caller updates in memory, in place of the pipeline's kernels."""

from collections.abc import Iterable

from tensorstow.states.native_handle import NativeHandle


class CallerChunks:
    """The chunks of a step that the caller updates (``StepKind``)."""

    def __init__(self, handle: NativeHandle, *, naive: bool) -> None:
        """Use the pipeline of ``handle``; ``naive``: a step ends after its writes."""
        self._handle = handle
        self._is_naive = naive

    def choose(self, chunks: Iterable[int]) -> None:
        """Leave these chunks to the caller from the next step on; all chunks until then."""
        self._handle.live().set_caller_chunks(list(chunks))

    def acquire(self, *, wait: bool) -> tuple[int, int] | None:
        """Return the next (chunk, slot) whose states are in memory and verified.

        Slot -1 means memory of the chunk's own. None: the step is over or has failed (``end``
        raises the error), or no chunk is ready and ``wait`` is False. A caller that holds a chunk
        must not wait, or it may block for ever.
        """
        chunk, slot = self._handle.live().acquire_chunk(wait=wait)
        return None if chunk < 0 else (chunk, slot)

    def release(self, chunk: int) -> None:
        """Return an acquired chunk whose memory holds the new states to the pipeline."""
        self._handle.live().release_chunk(chunk)

    def changes(self) -> int:
        """Return how often ``wait_change`` could have ended so far.

        It counts chunks that the step is done with or that can be acquired, and ``signal``.
        """
        return self._handle.live().changes()

    def wait_change(self, seen: int) -> None:
        """Block until ``changes`` is no longer ``seen``."""
        self._handle.check(self._handle.live().wait_change(seen))

    def signal(self) -> None:
        """Wake who waits for a change. Any thread may call, also after a failure."""
        if self._handle.native is not None:
            self._handle.native.signal()

    def end(self) -> None:
        """Wait until the step is complete; raise the pipeline's error if it failed."""
        native = self._handle.live()
        self._handle.check(native.wait_published())
        if self._is_naive:
            self._handle.check(native.quiesce())
