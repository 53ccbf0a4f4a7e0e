"""Moments at which a child kills itself: before or after the n-th call of something."""

import functools
import os
import signal
from typing import Any

from tensorstow.checkpoint import commits
from tensorstow.checkpoint import resume as resuming
from tensorstow.memory import buffer_pool
from tensorstow.states import native_pipeline, state_store, stored
from tensorstow.step import disk_feed
from tensorstow.store import durability, manifest, space, store

MOMENTS: dict[str, tuple[Any, str, str]] = {
    # Making a store.
    "a new manifest without tables": (manifest.Manifest, "begin_run", "before"),
    "a new store": (manifest.Manifest, "begin_run", "after"),
    "room for states": (space.StoreSpace, "_grow", "after"),
    # A commit, in its order.
    "a tensor of a commit written": (store.Store, "write_tensor", "after"),
    "states not waited for": (commits, "chunk_record", "before"),
    "before the sync of files": (durability.SystemDisk, "sync_file", "before"),
    "between sync and transaction": (durability.SystemDisk, "sync_file", "after"),
    "rows written, not committed": (durability.SystemDisk, "end_transaction", "before"),
    "behind the transaction": (durability.SystemDisk, "end_transaction", "after"),
    "before chunks get new extents": (commits.CommittedExtents, "retarget", "before"),
    "an extent given back": (stored.StoreStorage, "release", "after"),
    "chunks have new extents": (commits.CommittedExtents, "retarget", "after"),
    # Going back.
    "resuming begins": (resuming, "match", "before"),
    "an extent adopted": (stored.StoreStorage, "adopt", "after"),
    "weights half loaded": (resuming, "weight_checksums", "after"),
    "resumed but for a little": (resuming, "_begin", "after"),
    # Snapshots.
    "before a pin": (manifest.Manifest, "add_snapshot", "before"),
    "behind a pin": (manifest.Manifest, "add_snapshot", "after"),
    "before a drop": (manifest.Manifest, "drop_snapshot", "before"),
    "behind a drop": (manifest.Manifest, "drop_snapshot", "after"),
    # A step.
    "a step handed over": (state_store.UpdatePipeline, "step", "after"),
    "a step begins": (state_store.UpdatePipeline, "step", "before"),
    "before updates are undone": (native_pipeline.UpdatePipeline, "undo", "before"),
    "updates are undone": (native_pipeline.UpdatePipeline, "undo", "after"),
    "updates are confirmed": (native_pipeline.UpdatePipeline, "confirm", "after"),
    "old weights on disk are back": (buffer_pool.BufferPool, "put_back", "after"),
    "new weights on disk are kept": (disk_feed.DiskFeed, "confirm", "after"),
}
UNDONE = ("before updates are undone", "updates are undone", "updates are confirmed")
"""Moments of steps that may be undone."""
UNDONE_ON_DISK = ("old weights on disk are back", "new weights on disk are kept")
"""The same with weights on disk."""


def arm(moment: str, count: int) -> None:
    """Kill this process the ``count``-th time that ``moment`` comes."""
    arm_at(MOMENTS[moment], count)


def arm_at(place: tuple[Any, str, str], count: int) -> None:
    """Kill this process the ``count``-th time that it gets to ``place``."""
    owner, name, when = place
    function = getattr(owner, name)
    left = count

    @functools.wraps(function)
    def deadly(*args: object, **kwargs: object) -> object:
        nonlocal left
        left -= 1
        if left == 0 and when == "before":
            die()
        result = function(*args, **kwargs)
        if left == 0:
            die()
        return result

    setattr(owner, name, deadly)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
