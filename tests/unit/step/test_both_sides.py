"""A step of two sides goes on by whichever side can, and says how long each took."""

import threading
from typing import Any

import pytest

from tensorstow.step.gradient_feed import GradientFeed, run_to_end


class Changes:
    """A count that any thread increments."""

    def __init__(self) -> None:
        self.count = 0
        self.condition = threading.Condition()

    def changes(self) -> int:
        return self.count

    def wait_change(self, seen: int) -> None:
        with self.condition:
            assert self.condition.wait_for(lambda: self.count != seen, 30)

    def signal(self) -> None:
        with self.condition:
            self.count += 1
            self.condition.notify_all()


class Copy:
    """A copy that ends when it is ``let_go``; ``error``: of the device."""

    def __init__(self, error: Exception | None = None) -> None:
        self.let_go, self.error = threading.Event(), error

    def query(self) -> bool:
        return self.let_go.is_set()

    def synchronize(self) -> None:
        assert self.let_go.wait(30)
        if self.error is not None:
            raise self.error


class Copied(GradientFeed):
    """A side that is over with its copy, and lets the other side's go then."""

    def __init__(self, copy: Copy, other: Copy | None = None) -> None:
        self.copy, self.other = copy, other

    @property
    def oldest_copy(self) -> Copy:
        return self.copy

    @property
    def is_over(self) -> bool:
        return self.copy.query()

    def move_on(self) -> None:
        if self.is_over and self.other is not None:
            self.other.let_go.set()


@pytest.mark.parametrize("first", [0, 1])
def test_either_side_may_be_the_first(first: int) -> None:
    """The other one's copy ends only after that: to wait for it alone would never end."""
    copies = Copy(), Copy()
    sides = [Copied(copy) for copy in copies]
    sides[first].other = copies[1 - first]
    late = threading.Timer(0.05, copies[first].let_go.set)
    changes: Any = Changes()
    seconds = run_to_end(sides, changes, late.start)
    assert seconds.keys() == {*sides}
    assert seconds[sides[first]] <= seconds[sides[1 - first]]


def test_an_error_of_the_device_is_raised() -> None:
    broken, whole = Copy(RuntimeError("unspecified launch failure")), Copy()
    changes: Any = Changes()

    def end() -> None:
        broken.let_go.set()
        whole.let_go.set()

    class Never(Copied):
        """A side whose copy is never seen to be over."""

        is_over = False

    late = threading.Timer(0.05, end)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        run_to_end([Never(broken), Never(whole)], changes, late.start)
