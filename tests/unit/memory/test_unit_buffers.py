"""Buffers of units: within the capacity, reused, and taken from who is needed last."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tensorstow.base.errors import BudgetError
from tensorstow.memory.unit_buffers import UnitBuffers


@dataclass(eq=False)
class Piece:
    name: str
    nbytes: int = 10
    users: int = 0


@dataclass
class Rig:
    """Buffers of pieces that are used in the order of ``following``."""

    capacity: int
    following: list[Piece] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffers: UnitBuffers[Piece, int] = UnitBuffers(
            self.capacity,
            self._allocate,
            lambda piece, _: self.settled.append(piece.name),
            self._upcoming,
        )

    def _upcoming(self) -> Iterator[Piece]:
        yield from self.following

    def _allocate(self, nbytes: int) -> int:
        self.made.append(nbytes)
        return len(self.made)


def pieces(*sizes: int) -> list[Piece]:
    return [Piece(f"p{i}", size) for i, size in enumerate(sizes)]


def test_the_one_that_is_needed_last_gives_way_and_its_buffer_is_used_again() -> None:
    a, b, c = every = pieces(10, 10, 10)
    rig = Rig(20, [b, a])
    rig.buffers.take(a, None)
    rig.buffers.take(b, None)
    assert rig.buffers.take(c, None) == 1  # a's
    assert rig.settled == ["p0"]
    assert [rig.buffers.get(each) for each in every] == [None, 2, 1]
    assert rig.made == [10, 10]
    assert rig.buffers.memory.held == rig.buffers.memory.peak == 20
    rig.buffers.drop(a)  # which has none
    assert rig.settled == ["p0"]


def test_who_is_used_or_to_be_kept_stays() -> None:
    a, b, c = pieces(10, 10, 10)
    rig = Rig(20, [a, b])
    rig.buffers.take(a, None)
    rig.buffers.take(b, None)
    assert rig.buffers.take(c, [a, b]) is None
    a.users = b.users = 1
    with pytest.raises(BudgetError, match=r"'p2' \(10 B\) is used while others \(20 B\) are"):
        rig.buffers.take(c, None)
    b.users = 0
    assert rig.buffers.take(c, [a]) == 2
    assert rig.settled == ["p1"]


def test_buffers_of_other_sizes_are_freed_for_a_new_one() -> None:
    a, b, c, large = pieces(10, 10, 10, 25)
    rig = Rig(30, [a, b, c])
    for each in (a, b, c):
        rig.buffers.take(each, None)
    rig.buffers.take(large, None)
    assert rig.made == [10, 10, 10, 25]
    assert rig.buffers.memory.held == 25
    rig.buffers.take(a, None)
    assert rig.buffers.memory.held == 10
    assert rig.buffers.memory.peak == 30


def test_a_buffer_is_free_when_settling_it_has_failed() -> None:
    a, b = pieces(10, 10)
    rig = Rig(10)

    def fail(piece: Piece, _: int) -> None:
        raise OSError(piece.name)

    rig.buffers._settle = fail
    rig.buffers.take(a, None)
    with pytest.raises(OSError, match="p0"):
        rig.buffers.take(b, None)
    assert rig.buffers.take(b, None) == 1


def test_what_cannot_be_allocated_is_not_counted() -> None:
    (a,) = pieces(10)
    rig = Rig(10)

    def fail(_: int) -> int:
        raise MemoryError

    rig.buffers._allocate = fail
    with pytest.raises(MemoryError):
        rig.buffers.take(a, None)
    assert rig.buffers.memory.held == rig.buffers.memory.peak == 0
