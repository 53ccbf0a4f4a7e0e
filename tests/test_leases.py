"""Leases: a unit keeps its memory until all of it is updated, and no more than two have it."""

from dataclasses import dataclass, field

import pytest

from tensorstow.optim.schedules.leases import Leases


@dataclass
class FakeLessor:
    """Counts leases."""

    log: list[str]
    name: str

    def fetch(self) -> None:
        """Do nothing."""

    def lease(self, *, to_change: bool = False) -> None:
        """Note it."""
        assert to_change
        self.log.append(f"+{self.name}")

    def release(self, *, changed: bool = False) -> None:
        """Note it."""
        assert changed
        self.log.append(f"-{self.name}")


@dataclass
class FakeMember:
    """A parameter's number and who lends it memory."""

    number: int
    lessor: FakeLessor | None


@dataclass
class FakeChunk:
    """A chunk and the numbers of its parameters."""

    number: int
    owners: tuple[int, ...]


@dataclass
class FakePipeline:
    """Publishes what it is told to."""

    log: list[str]
    published: set[int] = field(default_factory=set)

    def is_published(self, number: int) -> bool:
        """Return whether it was told."""
        return number in self.published

    def wait_parameters(self, numbers: list[int]) -> None:
        """Publish them."""
        self.log.append(f"wait{numbers}")
        self.published |= set(numbers)


@pytest.fixture
def log() -> list[str]:
    return []


def _leases(log: list[str], owners: list[tuple[int, ...]]) -> tuple[Leases, list[FakeMember]]:
    """Three lessors with two parameters each, in chunks of ``owners``."""
    lessors = [FakeLessor(log, name) for name in "abc"]
    members = [FakeMember(n, lessors[n // 2]) for n in range(6)]
    chunks = [FakeChunk(i, numbers) for i, numbers in enumerate(owners)]
    return Leases(FakePipeline(log), chunks, members), members


def test_a_third_lease_waits_for_the_first_to_be_updated(log: list[str]) -> None:
    leases, members = _leases(log, [(0, 1), (2, 3), (4, 5)])
    for member in members:
        leases.take(member)
        leases.landed(member)
    assert log == ["+a", "+b", "wait[0, 1]", "-a", "+c"]
    leases.end_all()
    assert log[-2:] == ["-b", "-c"]


def test_a_chunk_of_two_lessors_is_not_waited_for_before_it_has_both(log: list[str]) -> None:
    leases, members = _leases(log, [(0,), (1, 2, 3, 4), (5,)])
    for member in members:
        leases.take(member)
        leases.landed(member)
    assert log == ["+a", "+b", "+c"]  # the middle chunk lacked 4 when c was taken


def test_a_lease_ends_when_all_its_parameters_are_new(log: list[str]) -> None:
    leases, members = _leases(log, [(0, 1), (2, 3), (4, 5)])
    pipeline = leases._pipeline
    leases.take(members[0])
    leases.landed(members[0])
    pipeline.published.add(0)
    leases.end_published()
    assert log == ["+a"]  # its other parameter has not come
    leases.take(members[1])
    leases.landed(members[1])
    pipeline.published.add(1)
    leases.end_published()
    assert log == ["+a", "-a"]


def test_weights_in_memory_of_their_own_need_none(log: list[str]) -> None:
    leases = Leases(FakePipeline(log), [], [FakeMember(0, None)])
    leases.take(FakeMember(0, None))
    leases.end_all()
    assert log == []
