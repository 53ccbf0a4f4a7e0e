"""Marks of what is under way at an address, so that no push relies on what a clean removes.

[Note: Marks] A push marks itself before it looks for objects that are there, and a clean marks
itself before it looks for pushes. Each then looks for the marks of the other kind: whichever order
the requests have, at least one of the two sees the other. The push waits, the clean ends. That
needs no clock, but a bucket whose lists have what was written before: those of S3, GCS and Azure.
A process that is killed leaves its mark. On its own machine it is known to be gone, and the mark is
removed; elsewhere the mark stays until the push is repeated, or given up by the user. In the same
way at least one of two pushes of different commits by one name sees the other, and ends.
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tensorstow.base.errors import LockedError, RemoteError, StowError
from tensorstow.base.machine import is_gone, process_id
from tensorstow.store.remote import Remote

logger = logging.getLogger("tensorstow")

_PUSHES, _CLEANS = "pushes", "cleans"
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, *(30.0,) * 20)
"""Seconds between looks for the end of a clean: ten minutes in all."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark of a push or a clean."""

    path: str
    snapshot: str
    """The snapshot that is pushed; "" for a clean."""
    who: str
    """The process, for messages."""
    is_gone: bool | None
    """Whether the process has ended; None if it was on another machine, and nobody knows."""
    pushed: tuple[str, str]
    """What a push writes: the commit, and the digest of its rank's list; empty if it says none."""


@contextmanager
def push_marked(
    remote: Remote, name: str, rank: int, world: int, *, commit: str | None, digest: str
) -> Iterator[Callable[[], bool]]:
    """Mark a push while the block runs; wait for a clean under way before it.

    When the block ends, the list of the rank is written, and marks that killed pushes of the same
    rank left are removed too.

    Args:
        remote: The place that is pushed to.
        name: The snapshot.
        rank: The rank of this process.
        world: The number of ranks.
        commit: The id that all ranks have of the commit.
        digest: The digest of the rank's list.

    Yields:
        A function that returns whether the push still has its mark: a clean may have given it up,
        and another push of the same list may have ended.

    Raises:
        LockedError: Another commit is being pushed by that name.
        RemoteError: A clean does not end within ten minutes.
    """
    folder = f"{_PUSHES}/{name}"
    prefix = f"rank-{rank}-of-{world}-"
    pushed = f"{commit} of {world}", digest
    with _marked(remote, f"{folder}/{prefix}", pushed=pushed) as path:
        # Both looks come after this push's own mark: [Note: Marks].
        _refuse_others(remote, name, prefix, pushed)
        _wait_for_cleans(remote)
        yield lambda: remote.get(path) is not None
    for listed in remote.list(folder):
        if listed.startswith(prefix):
            remote.remove(f"{folder}/{listed}")


def _refuse_others(remote: Remote, name: str, prefix: str, pushed: tuple[str, str]) -> None:
    """Raise LockedError if another commit is being pushed by the same name.

    Each push is marked before it looks, so that at least one of two sees the other.
    """
    for mark in _marks(remote, _PUSHES):
        if mark.snapshot != name or mark.is_gone or not any(mark.pushed):
            continue
        is_of_rank = mark.path.startswith(f"{_PUSHES}/{name}/{prefix}")
        if mark.pushed[0] != pushed[0] or (is_of_rank and mark.pushed[1] != pushed[1]):
            message = (
                f"The snapshot {name!r} was to be written to {remote.url}, and another commit is"
                f" being pushed there by that name, by {mark.who}. Choose another name. If that"
                f" process was killed, give its push up: tensorstow run clean {remote.url}"
                f" --snapshot {name} --yes"
            )
            raise LockedError(message)


@contextmanager
def clean_marked(remote: Remote) -> Iterator[list[Mark]]:
    """Mark a clean while the block runs; yield the marks of other cleans and of pushes."""
    with _marked(remote, f"{_CLEANS}/") as path:
        yield [mark for mark in marks(remote) if mark.path != path]


def marks(remote: Remote) -> list[Mark]:
    """Return all marks."""
    return [*_marks(remote, _PUSHES), *_marks(remote, _CLEANS)]


@contextmanager
def _marked(remote: Remote, prefix: str, **more: object) -> Iterator[str]:
    """Have a mark while the block runs; yield its path."""
    path = f"{prefix}{uuid.uuid4().hex}.json"
    body = {**process_id(), "since": time.strftime("%F %T"), **more}
    remote.put(path, json.dumps(body).encode())
    try:
        yield path
    except BaseException:
        with suppress(StowError):
            # One try, without pauses: the error of the block is raised at once.
            remote.remove(path, repeats=False)
        raise
    remote.remove(path)


def _marks(remote: Remote, folder: str) -> list[Mark]:
    read = []
    for name in sorted(remote.list(folder)):
        body = remote.get(f"{folder}/{name}") if name.endswith(".json") else None
        if body is not None:  # else it is over by now
            snapshot = name.partition("/")[0] if folder == _PUSHES else ""
            read.append(Mark(f"{folder}/{name}", snapshot, *_facts(body)))
    return read


def _facts(body: bytes) -> tuple[str, bool | None, tuple[str, str]]:
    """Return the process that made a mark, in words, whether it is gone, and what it pushes."""
    try:
        mark: dict[str, Any] = json.loads(body)
        who = f"pid {mark['pid']} on {mark['machine'][0]} since {mark['since']}"
        commit, digest = mark.get("pushed", ("", ""))
        return who, is_gone(mark), (str(commit), str(digest))
    except (AttributeError, LookupError, TypeError, ValueError):
        # Nobody knows whether it has ended, so its mark stays.
        return "a process that its mark does not name", None, ("", "")


def _wait_for_cleans(remote: Remote) -> None:
    for pause in (*_PAUSES, None):
        # A process on another machine counts as alive: nobody knows whether it has ended.
        waits_for = [mark for mark in _marks(remote, _CLEANS) if not mark.is_gone]
        if not waits_for:
            return
        (mark, *_) = waits_for
        if pause is None:
            message = (
                f"A push to {remote.url} was requested, and a clean of it by {mark.who} does not"
                f" end. If that process is over, delete {remote.url}/{mark.path}, then push again."
            )
            raise RemoteError(message)
        logger.warning("a push to %s waits for a clean by %s", remote.url, mark.who)
        time.sleep(pause)
