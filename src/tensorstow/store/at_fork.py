"""Closes inherited files in a forked child before any of its own code runs.

An flock belongs to the open file, which a child shares: a killed parent's store would stay locked
until, say, its data loader's workers end. An SQLite handle must not be used in a child, not even to
close it.
"""

import os
import threading
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something that a child inherits and must not keep."""

    def abandon(self) -> None:
        """Close the child's copies without any effect on the parent's."""


guard = threading.RLock()
"""Held while such a thing is made and registered, so that no fork falls in between."""

_alive: "weakref.WeakSet[Inherited]" = weakref.WeakSet()


def abandon_in_children(thing: Inherited) -> None:
    """Call ``thing.abandon()`` in every child forked from now on, while ``thing`` is alive."""
    _alive.add(thing)


def _in_child() -> None:
    for thing in list(_alive):
        thing.abandon()
    _alive.clear()
    # The thread that forked acquired it, and is the only one in the child.
    guard.release()


os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=_in_child)
