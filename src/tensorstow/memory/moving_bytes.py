"""Bytes that move between memory and disk as one, and the states that they pass through.

ABSENT --read--> READING --settle--> PRESENT --write--> WRITING --settle--> PRESENT
PRESENT --read--> READING, if more of them are read
   any state but ABSENT --leave--> ABSENT, and bytes that no disk has yet begin as PRESENT
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from tensorstow.io.files import IoFuture, wait_for_all


class ByteState(Enum):
    """Where bytes are, and what uses their memory."""

    ABSENT = "on disk, or nowhere yet: they have no memory"
    READING = "a read fills their memory"
    PRESENT = "in memory"
    WRITING = "in memory, which a write reads"


LEGAL = {
    ByteState.ABSENT: {ByteState.READING, ByteState.PRESENT},
    ByteState.READING: {ByteState.PRESENT, ByteState.ABSENT},
    ByteState.PRESENT: {ByteState.READING, ByteState.WRITING, ByteState.ABSENT},
    ByteState.WRITING: {ByteState.PRESENT, ByteState.ABSENT},
}
"""The states that may follow each state."""


@dataclass(eq=False, slots=True)
class MovingBytes:
    """A state and the transfers under way; a manager's class for what it moves extends it."""

    state: ByteState = field(default=ByteState.ABSENT, init=False)
    transfers: list[IoFuture] = field(default_factory=list, init=False)
    """Transfers that were not settled."""

    @property
    def is_in_memory(self) -> bool:
        """Whether the bytes have memory, filled or not."""
        return self.state is not ByteState.ABSENT

    def move(self, state: ByteState) -> None:
        """Change the state, by ``LEGAL`` alone."""
        if state not in LEGAL[self.state]:
            message = f"Bytes that are {self.state.name} cannot become {state.name}."
            raise AssertionError(message)
        self.state = state

    def begin(self, state: ByteState, *transfers: IoFuture) -> None:
        """Enter READING or WRITING with the transfers that do it."""
        self.transfers += transfers  # first: another thread may ask ``is_over`` by the state
        self.move(state)

    def is_over(self) -> bool:
        """Return whether every transfer is over, well or not; never waits."""
        return all(transfer.done() for transfer in self.transfers)

    def wait(self) -> None:
        """Wait for every transfer; raise the first error, also when called again."""
        wait_for_all(tuple(self.transfers))  # another thread may settle them meanwhile

    def settle(self, check: Callable[[], object] | None = None) -> None:
        """Wait for the transfers, if any are under way, and call ``check``; then be PRESENT.

        If it or a transfer raises an error, the state stays.
        """
        if self.state in {ByteState.READING, ByteState.WRITING}:
            self.wait()
            if check is not None:
                check()
            self.transfers.clear()
            self.move(ByteState.PRESENT)

    def leave(self) -> None:
        """Become ABSENT, whatever the state, when no transfer uses the memory; drop its errors."""
        with suppress(OSError):  # a read that was not used: the next one raises it again
            self.wait()
        self.transfers.clear()
        if self.is_in_memory:
            self.move(ByteState.ABSENT)
