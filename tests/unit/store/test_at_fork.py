"""A child lets go at once, and only of what is still there."""

import os

import pytest

from tensorstow.store import at_fork

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Thing:
    def __init__(self) -> None:
        self.abandoned = False

    def abandon(self) -> None:
        self.abandoned = True


def test_only_the_child_lets_go() -> None:
    thing, gone = Thing(), Thing()
    at_fork.abandon_in_children(thing)
    at_fork.abandon_in_children(gone)
    del gone
    pid = os.fork()
    if pid == 0:
        free = at_fork.guard.acquire(blocking=False)
        os._exit(int(thing.abandoned) + 2 * free)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert not thing.abandoned
