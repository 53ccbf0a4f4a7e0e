"""Weights that are on disk: lent memory while a step updates them.

[Note: Leases] A step over such weights is an open one, whatever the schedule: a parameter's
gradient is handed over when its weight is in memory, and when all that was handed over of one
lessor has its new weights, the lease ends and they are written back. A chunk may have pieces of two
lessors, so nobody waits for one whose chunks still lack a gradient.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensorstow.optim.members import Member
from tensorstow.optim.shards import Lessor
from tensorstow.optim.states.chunks import Chunk
from tensorstow.optim.states.pipeline import UpdatePipeline

_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class _Lease:
    lessor: Lessor
    numbers: list[int]
    """Of the parameters that are to be updated under it."""


class Leases:
    """The leases of one step that is open."""

    def __init__(
        self, pipeline: UpdatePipeline, chunks: Sequence[Chunk], dues: Iterable[Member]
    ) -> None:
        """Begin with none; ``dues``: parameters that may get a gradient."""
        self._pipeline = pipeline
        self._leases: dict[int, _Lease] = {}
        self._numbers: dict[int, list[int]] = {}
        self._landed: set[int] = set()
        self._chunks_of: dict[int, list[int]] = {}
        self._awaited: dict[int, int] = {}
        expected = set()
        for member in dues:
            expected.add(member.number)
            self._numbers.setdefault(id(member.lessor), []).append(member.number)
        for chunk in chunks:
            owners = expected.intersection(chunk.owners)
            self._awaited[chunk.number] = len(owners)
            for number in owners:
                self._chunks_of.setdefault(number, []).append(chunk.number)

    def take(self, member: Member) -> None:
        """Return when the weight of ``member`` is in memory, and may be updated.

        Ends other leases first, where too many are open and what they wait for is under way.
        """
        lessor = member.lessor
        if lessor is None:
            return
        if id(lessor) not in self._leases:
            self._shrink()
            lessor.lease(to_change=True)
            self._leases[id(lessor)] = _Lease(lessor, self._numbers[id(lessor)])

    def landed(self, member: Member) -> None:
        """Say that the gradient of ``member`` was handed over."""
        self._landed.add(member.number)
        for chunk in self._chunks_of.get(member.number, []):
            self._awaited[chunk] -= 1

    def end_published(self) -> None:
        """End the leases whose weights are new."""
        for key, lease in list(self._leases.items()):
            if self._have_landed(lease) and all(map(self._pipeline.is_published, lease.numbers)):
                self._end(key)

    def end_all(self) -> None:
        """End every lease, when the step is over."""
        for key in list(self._leases):
            self._end(key)

    def _shrink(self) -> None:
        self.end_published()
        for key, lease in list(self._leases.items()):
            if len(self._leases) < _AT_ONCE:
                return
            if self._have_landed(lease) and all(
                self._awaited[c] == 0 for n in lease.numbers for c in self._chunks_of[n]
            ):
                self._pipeline.wait_parameters(lease.numbers)
                self._end(key)

    def _have_landed(self, lease: _Lease) -> bool:
        return self._landed.issuperset(lease.numbers)

    def _end(self, key: int) -> None:
        lease = self._leases.pop(key)
        lease.lessor.release(changed=True)
