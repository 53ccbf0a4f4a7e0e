"""Holds the native pipeline; raises what failed in it, and refuses use after a failure or fork."""

import os
from collections.abc import Callable
from pathlib import Path

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, ForkError, PoisonedError
from tensorstow.io.files import transfer_error

_DAMAGED = -2  # csrc/pipeline/pipeline.h
Failure = tuple[int, str, int, int, int, int]
"""Code, operation, file, chunk, offset, length; as csrc/pipeline has them. Code 0: none."""


class Resources:
    """What a pipeline must free in order, separate from the pipeline and its error.

    A finalizer can hold this without holding the pipeline: an error refers to the frames that
    raised it, and through them to the optimizer and the model.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.native: _native.Pipeline | None = None
        self.memory: list[object] = []
        """Not of the ring, that steps read and write: it must outlive the native pipeline."""

    def close(self) -> None:
        """Drain and stop the threads. Idempotent."""
        self.native = None


class NativeHandle:
    """One native pipeline, and its failure, if any."""

    def __init__(self) -> None:
        """Begin with none."""
        self.resources = Resources()
        self.path_of: Callable[[int], Path] = lambda _: Path("(no file)")
        """The path of a file by its number, for messages."""
        self._owner = os.getpid()
        self._poison: BaseException | None = None
        self._untold: BaseException | None = None
        """A failure in a background thread that no caller has seen yet."""
        self._is_closed = False

    @property
    def native(self) -> _native.Pipeline | None:
        """The pipeline, also where it has failed; None before it is made and when it is closed."""
        return self.resources.native

    @property
    def is_ours(self) -> bool:
        """Whether it is this process's, and not the parent's of a fork."""
        return self._owner == os.getpid()

    @property
    def is_begun(self) -> bool:
        """Whether a native pipeline exists, or has existed."""
        return self.native is not None or self.is_poisoned or self._is_closed

    @property
    def is_poisoned(self) -> bool:
        """Whether something failed in the middle of a step, so that states are half updated."""
        return self._poison is not None

    def live(self) -> _native.Pipeline:
        """Return the pipeline; raise PoisonedError or ForkError if it must not be used.

        A failure in a background thread is raised as itself the first time.
        """
        if self._owner != os.getpid():
            message = (
                "An optimizer was used in a forked process: its threads, buffers and files belong"
                " to the parent. Make the optimizer in the process that steps it."
            )
            raise ForkError(message)
        if self._untold is not None:
            untold, self._untold = self._untold, None
            raise untold
        if self._poison is not None:
            why = str(self._poison) or f"{type(self._poison).__name__} was raised in it."
            message = (
                f"This optimizer failed before and its states are half updated: {why} Load a"
                " checkpoint into a new optimizer; one over the directory of a run goes on from its"
                " last commit by resume()."
            )
            raise PoisonedError(message) from self._poison
        native = (
            self.resources.native
        )  # one call less than by its name: this runs for each gradient
        if native is None:
            message = "This optimizer was closed: its states are gone. Make a new one."
            raise PoisonedError(message)
        return native

    def poison(self, error: BaseException) -> None:
        """Refuse all further use; the first error is the cause of all later ones."""
        if self._poison is None:
            self._poison = error

    def check(self, failure: Failure, *, behind: bool = False) -> None:
        """Raise the failure, if any.

        ``behind``: this is a background thread; the failure is kept for the caller too.
        """
        if not failure[0]:
            return
        error = self._error_of(failure)
        if behind and self._poison is None:
            self._untold = error
        self.poison(error)
        raise error

    def damage(self, file: int, offset: int, length: int) -> DamageError:
        """Return the error of bytes that are not those that were written."""
        message = (
            f"read of {length} bytes at offset {offset} of {self.path_of(file)} gave other bytes"
            " than were written there: their checksum does not fit. Look at `dmesg` and the drive's"
            " health; go on from a snapshot, or from a checkpoint elsewhere."
        )
        return DamageError(message)

    def close(self) -> None:
        """Drain and stop the threads. Idempotent."""
        self.resources.close()
        self._is_closed = True

    def _error_of(self, failure: Failure) -> OSError:
        code, operation, file, _, offset, length = failure
        if code == _DAMAGED:
            return self.damage(file, offset, length)
        return transfer_error(self.path_of(file), operation, code, offset, length)
