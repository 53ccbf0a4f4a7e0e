"""Leases: weights are in memory for the chunks that are worked on, and for few units at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.tiers import Tier
from tensorstow.states.layout import Segment
from tensorstow.states.native_pipeline import StepRow
from tensorstow.step.chunk_gate import ChunkGate
from tensorstow.step.disk_feed import DiskFeed

GRADIENT = torch.ones(8)


def sent() -> None:
    """Be told that all was handed over."""


@dataclass(eq=False)
class FakePager:
    """Writes down who pinned what."""

    log: list[str]
    name: str
    for_write: bool | None = None
    nbytes: int = 100
    room: int = 1 << 20
    is_read: bool = True
    expected: list[str] = field(default_factory=list)

    def expect(self, following: Sequence["FakePager"]) -> None:
        """Note it."""
        self.expected = [pager.name for pager in following]

    def is_ready(self) -> bool:
        """Return whether it is in memory."""
        return self.is_read

    def can_pin(self, nbytes: int) -> bool:
        """Have room."""
        return nbytes <= self.room

    def pin(self, *, for_write: bool = False) -> None:
        """Note it."""
        self.for_write = for_write
        self.log.append(f"+{self.name}")

    def unpin(self, *, dirty: bool = False) -> None:
        """Note it, and whether the bytes are to be written."""
        self.log.append(f"-{self.name}" + "!" * dirty)


@dataclass(eq=False)
class FakeParam:
    """A parameter's number and the pager of its weight."""

    number: int
    pager: FakePager | None
    tier: Tier = Tier.DISK


@dataclass(eq=False)
class FakeChunk:
    """A chunk and the numbers of its parameters, of each of which it has four elements."""

    number: int
    owners: tuple[int, ...]

    @property
    def plan(self) -> Any:  # noqa: ANN401
        """Return where it has them: each from its second element on."""
        return SimpleNamespace(runs=[Segment(n, 1, 4, 4 * i) for i, n in enumerate(self.owners)])


@dataclass
class FakePipeline:
    """Is done with a chunk when it is told, or when it is waited for."""

    log: list[str]
    chunks: list[FakeChunk]
    added: dict[int, list[tuple[int, torch.Tensor | None]]] = field(default_factory=dict)
    updated: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    def add_chunk_gradients(
        self, chunk: int, pieces: list[tuple[int, torch.Tensor | None]]
    ) -> None:
        """Note it."""
        self.added[chunk] = pieces
        self.log.append(
            f"{chunk}:" + ",".join(str(n) for n, gradient in pieces if gradient is not None)
        )

    def is_updated(self, chunk: int) -> bool:
        """Return whether it was told."""
        return chunk in self.updated

    def wait_chunk(self, chunk: int) -> None:
        """Update it, which has all that it waits for."""
        assert chunk in self.added
        self.log.append(f"wait{chunk}")
        self.updated.add(chunk)

    @property
    def stored(self) -> "FakePipeline":
        """Return itself, for ``captured``."""
        return self

    def captured(self, chunk: FakeChunk) -> bool:
        """Return whether a commit has its weights of now."""
        return chunk.number in self.kept

    def order_now(self) -> list[int]:
        """Return the chunks."""
        return [chunk.number for chunk in self.chunks]


class Scene:
    """Three units, a, b and c, of two parameters each, in chunks of ``owners``."""

    def __init__(self, owners: list[tuple[int, ...]]) -> None:
        self.log: list[str] = []
        self.pagers = [FakePager(self.log, name) for name in "abc"]
        self.params = [FakeParam(n, self.pagers[n // 2]) for n in range(6)]
        self.chunks = [FakeChunk(i, numbers) for i, numbers in enumerate(owners)]
        self.pipeline = FakePipeline(self.log, self.chunks)

    def feed(self, **numbers: Any) -> DiskFeed:  # noqa: ANN401
        """Return the feed in a step in which all get gradients, if nothing else is said."""
        due = set(numbers.pop("due", range(6)))
        captures = numbers.pop("captures", False)
        feed = DiskFeed(self.pipeline, self.chunks, self.params)
        self.rows = [StepRow(expected=n in due) for n in range(6)]
        plan: Any = SimpleNamespace(rows=self.rows, updates=[], commits=captures)
        feed.prepare(plan)
        self.gate = ChunkGate(self.chunks)
        self.gate.begin(due)
        feed.begin(plan, self.gate)
        return feed

    def arrive(self, disk_feed: DiskFeed, *numbers: int) -> None:
        """Let gradients come."""
        for number in numbers:
            complete = self.gate.arrive(number)
            if self.params[number].tier is Tier.DISK:
                disk_feed.offer(self.params[number], GRADIENT)
            for chunk in complete:
                disk_feed.send(chunk)
            disk_feed.move_on()


def test_a_third_lease_waits_for_the_first_to_be_updated() -> None:
    scene = Scene([(0, 1), (2, 3), (4, 5)])
    disk_feed = scene.feed()
    scene.arrive(disk_feed, 0, 1, 2, 3, 4)
    assert scene.log == ["+a", "0:0,1", "+b", "1:2,3"]  # one of c's is not all that its chunk needs
    scene.arrive(disk_feed, 5)
    assert scene.log[4:] == ["wait0", "-a!", "+c", "2:4,5"]
    disk_feed.end()
    assert scene.log[-2:] == ["-b!", "-c!"]


def test_without_room_for_two_a_second_lease_waits() -> None:
    scene = Scene([(0, 1), (2, 3), (4, 5)])
    for pager in scene.pagers:
        pager.room = 99
    disk_feed = scene.feed()
    scene.arrive(disk_feed, 0, 1, 2, 3)
    assert scene.log == ["+a", "0:0,1", "wait0", "-a!", "+b", "1:2,3"]


def test_a_chunk_gets_its_pieces_of_the_gradients() -> None:
    scene = Scene([(0, 1)])
    disk_feed = scene.feed()
    scene.arrive(disk_feed, 0, 1)
    added = [(n, g) for n, g in scene.pipeline.added[0] if g is not None]
    assert [n for n, _ in added] == [0, 1]
    assert all(g.data_ptr() == GRADIENT[1:].data_ptr() and g.numel() == 4 for _, g in added)


def test_a_unit_whose_chunk_lacks_a_gradient_makes_room_and_is_pinned_again() -> None:
    """Each unit has a parameter, 1, 3 and 5, in a chunk with one that gets no gradient: 0."""
    scene = Scene([(1,), (3,), (5,), (0, 1, 3)])
    disk_feed = scene.feed()
    scene.arrive(disk_feed, 1, 3)
    scene.pipeline.updated |= {0, 1}
    scene.arrive(disk_feed, 5)
    assert scene.log == ["+a", "0:1", "+b", "1:3", "-a!", "+c", "2:5"]
    disk_feed.close(sent)
    assert scene.log[7:] == [
        "wait2",
        "-c!",
        "+a",
        "3:1,3",
    ]  # b was there still; 0 is not waited for
    disk_feed.end()
    assert scene.log[-2:] == ["-b!", "-a!"]


def test_a_unit_that_gets_nothing_is_never_pinned() -> None:
    scene = Scene([(0, 1), (2, 3), (4, 5)])
    disk_feed = scene.feed()
    scene.arrive(disk_feed, 2)
    disk_feed.close(sent)
    disk_feed.end()
    assert scene.log == ["0:", "+b", "1:2", "2:", "-b!"]


def test_what_is_left_is_handed_over_unit_by_unit() -> None:
    scene = Scene([(0,), (2,), (4,), (1,), (3,), (5,)])
    disk_feed = scene.feed()
    for param in scene.params:
        disk_feed.offer(param, GRADIENT)
    disk_feed.close(sent)
    disk_feed.end()
    pinned = [entry for entry in scene.log if entry[0] in "+-"]
    assert pinned == ["+a", "+b", "-a!", "+c", "-b!", "-c!"]


def test_what_is_left_is_read_ahead_unit_by_unit() -> None:
    scene = Scene([(0,), (2,), (4,), (1,), (3,), (5,)])
    disk_feed = scene.feed(due=[0, 1, 4])
    for param in scene.params:
        if param.number in (0, 1, 4):
            disk_feed.offer(param, GRADIENT)
    disk_feed.close(sent)
    assert [pager.expected for pager in scene.pagers] == [["c"], [], []]


def test_a_lease_ends_when_all_chunks_of_it_are_updated() -> None:
    scene = Scene([(0,), (1,), (2, 3)])
    disk_feed = scene.feed()
    scene.arrive(disk_feed, 0)
    scene.pipeline.updated.add(0)
    scene.arrive(disk_feed, 2)
    assert scene.log == ["+a", "0:0"]  # its other chunk is to come, and nobody needs the room
    scene.arrive(disk_feed, 1)
    scene.pipeline.updated.add(1)
    scene.arrive(disk_feed, 3)
    assert scene.log[2:] == ["1:1", "-a!", "+b", "2:2,3"]


def test_a_chunk_of_several_units_has_them_all_and_nobody_else() -> None:
    scene = Scene([(0,), (1, 2, 3, 4), (5,)])
    disk_feed = scene.feed()
    for number, param in enumerate(scene.params):
        disk_feed.offer(param, GRADIENT)
        assert not scene.log, number  # not before it is asked to
    disk_feed.close(sent)
    assert scene.log[:5] == ["+a", "0:0", "+b", "+c", "1:1,2,3,4"]
    assert scene.log[5:] == ["wait0", "wait1", "-a!", "-b!", "2:5"]


def test_a_commit_pins_unit_by_unit_what_it_has_not_got_and_writes_nothing() -> None:
    scene = Scene([(0, 1), (2, 3), (4, 5)])
    scene.pipeline.kept = {1}
    disk_feed = scene.feed(due=(), captures=True)
    disk_feed.close(sent)
    disk_feed.end()
    assert scene.log == ["+a", "0:", "1:", "+c", "2:", "-a", "-c"]
    assert scene.pagers[0].for_write is False


def test_a_step_that_commits_has_the_weights_beside_those_that_it_updates() -> None:
    scene = Scene([(0, 2), (3, 4), (1, 5)])
    scene.pipeline.kept = {0, 1, 2}
    disk_feed = scene.feed(due=(0, 1, 4), captures=True)
    scene.arrive(disk_feed, 0)
    assert scene.log == ["+a", "+b", "0:0"]
    disk_feed.close(sent)
    # 3 and 4 lie together and 4 gets no gradient: what a commit has of them is what they are.
    assert scene.log[3:] == ["1:", "2:"]


def test_without_a_commit_what_is_not_updated_is_not_pinned() -> None:
    scene = Scene([(0, 2), (4, 5)])
    disk_feed = scene.feed(due=(0, 4))
    scene.arrive(disk_feed, 0)
    assert scene.log == ["+a", "0:0"]


def test_what_others_hand_over_is_not_waited_for() -> None:
    scene = Scene([(0, 1), (2, 3), (4, 5)])
    scene.params[1].pager, scene.params[1].tier = None, Tier.DEVICE
    disk_feed = scene.feed(due=(0, 2, 3, 4, 5))
    scene.arrive(disk_feed, 0, 2, 3, 4, 5)
    assert scene.log == ["+a", "0:0", "+b", "1:2,3", "wait1", "-b!", "+c", "2:4,5"]


def test_a_gradient_that_was_not_expected_is_refused() -> None:
    scene = Scene([(0, 1)])
    disk_feed = scene.feed(due=(0,), captures=True)
    with pytest.raises(OptionError, match="unfreeze"):
        scene.arrive(disk_feed, 1)


def test_a_commit_has_a_word_on_each_weight_on_disk() -> None:
    scene = Scene([(0, 1, 2, 3, 4, 5)])
    scene.params[0].pager, scene.params[0].tier = None, Tier.HOST
    scene.feed(due=(0,))
    assert [row.expected for row in scene.rows] == [True] + [False] * 5
    scene.feed(due=(0,), captures=True)
    assert [row.expected for row in scene.rows] == [True] * 6


class Ends:
    """Counts how often it was told that all was handed over."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def beside_a_forward(owners: list[tuple[int, ...]], **room: int) -> tuple[Scene, DiskFeed, Ends]:
    """Return a step with all gradients, closed without waiting."""
    scene, ends = Scene(owners), Ends()
    for pager in scene.pagers:
        pager.room = room.get(pager.name, pager.room)
        pager.is_read = False
    disk_feed = scene.feed()
    for param in scene.params:
        disk_feed.offer(param, GRADIENT)
    disk_feed.close(ends, waits=False)
    return scene, disk_feed, ends


def test_beside_a_forward_a_step_begins_with_one_unit_and_has_the_next_ones_read() -> None:
    scene, _, ends = beside_a_forward([(0, 1), (2, 3), (4, 5)])
    assert scene.log == ["+a", "0:0,1"]
    assert scene.pagers[0].expected == ["b", "c"]
    assert not ends.count


def test_beside_a_forward_chunks_of_a_unit_in_memory_are_handed_over_at_once() -> None:
    scene, _, _ = beside_a_forward([(0,), (1,), (2, 3), (4, 5)])
    assert scene.log == ["+a", "0:0", "1:1"]


def test_beside_a_forward_a_unit_that_is_read_is_updated_while_another_computes() -> None:
    scene, disk_feed, ends = beside_a_forward([(0, 1), (2, 3), (4, 5)])
    scene.pagers[1].is_read = scene.pagers[2].is_read = True
    disk_feed.wait([0, 1])
    disk_feed.move_on()
    assert scene.log[2:] == ["+b", "1:2,3"]  # two are pinned at most
    scene.pipeline.updated.add(0)
    disk_feed.move_on()
    assert scene.log[4:] == ["-a!", "+c", "2:4,5"]
    assert ends.count == 1
    scene.pipeline.updated |= {1, 2}
    disk_feed.move_on()
    assert scene.log[7:] == ["-b!", "-c!"]
    disk_feed.wait(None)
    assert ends.count == 1


def test_beside_a_forward_a_unit_without_room_waits_until_a_weight_of_it_is_read() -> None:
    scene, disk_feed, _ = beside_a_forward([(0, 1), (2, 3), (4, 5)], b=99)
    scene.pagers[1].is_read = True
    disk_feed.move_on()
    assert scene.log == ["+a", "0:0,1"]
    disk_feed.wait([3])
    assert scene.log[2:] == ["wait0", "-a!", "+b", "1:2,3"]


def test_beside_a_forward_a_weight_that_is_read_early_has_all_before_it_updated_first() -> None:
    """The pipeline has the states of chunks in memory in their order, of few at once."""
    scene, disk_feed, ends = beside_a_forward([(0, 1), (2, 3), (4, 5)])
    disk_feed.wait([4])
    assert scene.log[2:] == ["+b", "1:2,3", "wait0", "-a!", "+c", "2:4,5"]
    assert ends.count == 1


def test_beside_a_forward_a_wait_for_all_hands_all_over() -> None:
    scene, disk_feed, ends = beside_a_forward([(0, 1), (2, 3), (4, 5)])
    disk_feed.wait(None)
    assert set(scene.pipeline.added) == {0, 1, 2}
    assert ends.count == 1
    disk_feed.end()
    assert scene.log[-2:] == ["-b!", "-c!"]


def test_a_step_that_is_given_up_hands_nothing_over_any_more() -> None:
    scene, disk_feed, ends = beside_a_forward([(0, 1), (2, 3), (4, 5)])
    disk_feed.end()
    disk_feed.wait(None)
    assert scene.log == ["+a", "0:0,1", "-a!"]
    assert not ends.count


def test_beside_a_forward_room_is_left_for_what_computes() -> None:
    scene, disk_feed, _ = beside_a_forward([(0, 1), (2, 3), (4, 5)], b=100)
    scene.pagers[1].is_read = True
    disk_feed.move_on()
    scene.pagers[0].room = scene.pagers[1].room = -1  # a forward has pinned others
    disk_feed.wait(())
    assert scene.log == ["+a", "0:0,1", "+b", "1:2,3", "wait0", "-a!", "wait1", "-b!"]
