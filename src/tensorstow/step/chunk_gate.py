"""Counts which gradients each chunk of a step still awaits.

[Note: One count] A chunk of states is updated as one, when every gradient that it will get is
final. Its parameters may be on different tiers, whose gradients come by different feeds. Each final
gradient is counted here once. A feed takes a buffer or pins memory for a chunk only when the chunk
is complete, so nothing is held for a gradient that is still to come. The native pipeline has its
own count: of gradients that it may read, which come later if they are copied from a device.
"""

from collections.abc import Collection, Iterable

from tensorstow.base.errors import OptionError
from tensorstow.states.chunks import Chunk


class ChunkGate:
    """Counts, for each chunk of a step, the gradients that are still to come."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._owners = {chunk.number: tuple(chunk.owners) for chunk in chunks}
        self._chunks_of: dict[int, list[int]] = {}
        for chunk, owners in self._owners.items():
            for number in owners:
                self._chunks_of.setdefault(number, []).append(chunk)
        self._awaited: dict[int, int] = {}
        self._expected: set[int] = set()
        self._begun: set[int] = set()

    def begin(self, expected: Collection[int], final: Iterable[int] = ()) -> None:
        """Begin a step in which gradients of the ``expected`` parameters may become final.

        ``final``: numbers of those whose gradients the pipeline has from the start of the step.
        """
        self._expected = set(expected)
        self._awaited = {
            chunk: sum(number in self._expected for number in owners)
            for chunk, owners in self._owners.items()
        }
        self._begun = {chunk for number in final for chunk in self._chunks_of.get(number, ())}

    def arrive(self, number: int) -> list[int]:
        """Count the final gradient of a parameter; return the chunks that it completes.

        Raises OptionError if no gradient of the parameter is expected.
        """
        if number not in self._expected:
            message = (
                "A parameter that was frozen when the step began got a gradient: unfreeze it before"
                " backward."
            )
            raise OptionError(message)
        self._expected.discard(number)
        complete = []
        for chunk in self._chunks_of.get(number, ()):
            self._begun.add(chunk)
            self._awaited[chunk] -= 1
            if self._awaited[chunk] == 0:
                complete.append(chunk)
        return complete

    def is_complete(self, number: int) -> bool:
        """Return whether no chunk of a parameter awaits a gradient: it can be updated."""
        return all(self._awaited[chunk] == 0 for chunk in self._chunks_of.get(number, ()))

    def has_gradient(self, chunk: int) -> bool:
        """Return whether any gradient of a chunk is final in this step."""
        return chunk in self._begun
