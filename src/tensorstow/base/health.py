"""The process that an object belongs to, and the failure after which it must not be used.

[Note: Health] Threads, buffers and files belong to the process that opened them: a forked child
must not use them, nor close them. A failure in the middle of an update leaves contents that are
half updated: the first failure is kept, and is the cause of the error of every later call.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tensorstow.base.errors import ForkError, PoisonedError

OPTIMIZER_FORKED = (
    "An optimizer was used in a forked process: its threads, buffers and files belong to the"
    " parent. Make the optimizer in the process that steps it."
)
OPTIMIZER_FAILED = (
    "This optimizer failed before and its states are half updated: {} Load a checkpoint into a"
    " new optimizer"
)


class Health:
    """Whether an object may be used: by the process that made it, until something fails."""

    def __init__(self, forked: str, failed: str = "{}") -> None:
        """Begin sound, in this process.

        Args:
            forked: The message of the error in a forked process.
            failed: The message of the error after a failure; ``{}`` in it is the failure's text.
        """
        self.owner = os.getpid()
        self.failure: BaseException | None = None
        self._forked = forked
        self._failed = failed

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made the object."""
        return self.owner == os.getpid()

    def poison(self, error: BaseException) -> None:
        """Let every later check raise an error, whose cause is the first failure."""
        if self.failure is None:
            self.failure = error

    @contextmanager
    def poisoning(self) -> Iterator[None]:
        """Poison the object by any error of the block."""
        try:
            yield
        except BaseException as error:
            self.poison(error)
            raise

    def check_process(self) -> None:
        """Raise ForkError in a process that inherited the object."""
        if self.owner != os.getpid():
            raise ForkError(self._forked)

    def check(self) -> None:
        """Raise an error if the object must not be used.

        Raises:
            ForkError: This is not the process that made the object.
            PoisonedError: Something failed before, which is the cause of this error.
        """
        self.check_process()
        if self.failure is not None:
            text = str(self.failure) or f"{type(self.failure).__name__} was raised in it."
            raise PoisonedError(self._failed.format(text)) from self.failure
