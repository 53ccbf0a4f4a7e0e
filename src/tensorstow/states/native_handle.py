"""The holder of the native pipeline: raises its failures, and refuses use after one or a fork."""

import threading
from collections.abc import Callable
from pathlib import Path

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, PoisonedError
from tensorstow.base.health import OPTIMIZER_FAILED, OPTIMIZER_FORKED, Health
from tensorstow.io.files import transfer_error

_RESUME = "one over the directory of a run goes on from its last commit by resume()."
_DAMAGED = -2  # csrc/pipeline/pipeline.h
Failure = tuple[int, str, int, int, int, int]
"""Code, operation, file, chunk, offset, length; as csrc/pipeline has them. Code 0: none."""


class Resources:
    """Resources that a pipeline must free in order, separate from the pipeline and its error.

    A finalizer can hold this without holding the pipeline: an error refers to the frames that
    raised it, and through them to the optimizer and the model.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.native: _native.Pipeline | None = None
        self.memory: list[object] = []
        """Memory outside the ring that steps read and write: it outlives the native pipeline."""

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
        self._health = Health(OPTIMIZER_FORKED, f"{OPTIMIZER_FAILED}; {_RESUME}")
        self._unreported: BaseException | None = None
        """A failure in a background thread that no caller has seen yet."""
        self._reporting = threading.Lock()
        self._is_closed = False

    @property
    def native(self) -> _native.Pipeline | None:
        """The pipeline, also after a failure; None before it is created and after it is closed."""
        return self.resources.native

    @property
    def is_ours(self) -> bool:
        """Whether this process created it, and not the parent of a fork."""
        return self._health.is_ours

    @property
    def is_begun(self) -> bool:
        """Whether a native pipeline exists, or has existed."""
        return self.native is not None or self.is_poisoned or self._is_closed

    @property
    def is_poisoned(self) -> bool:
        """Whether something failed in the middle of a step, so that states are half updated."""
        return self._health.failure is not None

    @property
    def failure_was_raised(self) -> bool:
        """Whether something failed, and a caller has got its error."""
        return self.is_poisoned and self._unreported is None

    def live(self) -> _native.Pipeline:
        """Return the pipeline; raise PoisonedError or ForkError if it must not be used.

        A failure in a background thread is raised as itself the first time.
        """
        if self._unreported is not None:
            # The failure is the parent's: a forked child must not take it away.
            self._health.check_process()
            unreported, self._unreported = self._unreported, None
            raise unreported
        self._health.check()
        native = self.resources.native
        if native is None:
            message = "This optimizer was closed: its states are gone. Create a new one."
            raise PoisonedError(message)
        return native

    def poison(self, error: BaseException) -> None:
        """Refuse all further use; the first error is the cause of all later ones."""
        self._health.poison(error)

    def check(self, failure: Failure, *, in_background: bool = False) -> None:
        """Raise the failure, if any.

        ``in_background``: this is a background thread; the failure is raised to the caller, too.
        """
        if not failure[0]:
            return
        error = self._error_of(failure)
        # The caller and a background thread may find one failure at the same time.
        with self._reporting:
            if not in_background:
                self._unreported = None  # the caller sees it now
            elif not self.is_poisoned:
                self._unreported = error
            self.poison(error)
        raise error

    def damage(self, file: int, offset: int, length: int) -> DamageError:
        """Return the error for bytes that differ from those written."""
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
