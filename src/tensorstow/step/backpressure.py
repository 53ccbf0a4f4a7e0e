"""How far backward may be ahead of the updates beside it.

[Note: Pace] Where a batch is small, backward makes gradients faster than a disk moves states, and
those that wait would fill host memory: with states on disk they would be most of it. Backward waits
where more than a window of them does; the window is several times what the ring works on, so the
disk is never idle for it, and what backward loses now the step would have lost at its end.
"""

from collections.abc import Iterable, Sequence

from tensorstow.states.chunks import Chunk
from tensorstow.states.native_pipeline import UpdatePipeline

WINDOW_BYTES = 64 << 20
"""Of gradients that wait for their update."""


class Backpressure:
    """What one step beside backward waits for."""

    def __init__(
        self, pipeline: UpdatePipeline, chunks: Iterable[Chunk], due: Iterable[int]
    ) -> None:
        """Begin a step in which the parameters ``due``, by number, may get a gradient."""
        self._pipeline = pipeline
        self._awaited: dict[int, int] = {}
        self._chunks_of: dict[int, list[int]] = {}
        expected = frozenset(due)
        for chunk in chunks:
            owners = expected.intersection(chunk.owners)
            self._awaited[chunk.number] = len(owners)
            for number in owners:
                self._chunks_of.setdefault(number, []).append(chunk.number)

    def landed(self, number: int) -> None:
        """Say that the gradient of a parameter was handed over."""
        for chunk in self._chunks_of.get(number, []):
            self._awaited[chunk] -= 1

    def wait_for_one(self, numbers: Sequence[int]) -> bool:
        """Return when one of these parameters, the first that can be, is updated.

        False at once where each shares a chunk with one whose gradient is still to come.
        """
        for number in numbers:
            if all(self._awaited[chunk] == 0 for chunk in self._chunks_of[number]):
                self._pipeline.wait_parameters([number])
                return True
        return False
