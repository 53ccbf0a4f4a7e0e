"""Marks of what is under way at an address, so that no push relies on what a clean removes.

[Note: Marks] A push marks itself before it looks for objects that are there, and a clean marks
itself before it looks for pushes. Each then looks for the marks of the other kind: whichever order
the requests have, at least one of the two sees the other. The push waits, the clean ends. That
needs no clock, but a bucket whose lists have what was written before: those of S3, GCS and Azure.
A process that is killed leaves its mark. On its own machine it is known to be gone, and the mark is
removed; elsewhere the mark stays until the push is repeated, or given up by the user.
"""

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tensorstow.base.cores import read_or_empty
from tensorstow.base.errors import RemoteError, StowError
from tensorstow.base.machine import machine_id
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


@contextmanager
def push_marked(remote: Remote, name: str, rank: int, world: int) -> Iterator[Callable[[], None]]:
    """Mark a push while the block runs; wait for a clean under way before it.

    When the block ends, the list of the rank is written, and marks that killed pushes of the same
    rank left are removed too. Raises RemoteError if a clean does not end within ten minutes.
    """
    folder = f"{_PUSHES}/{name}"
    prefix = f"rank-{rank}-of-{world}-"
    path = _put(remote, f"{folder}/{prefix}")

    def check() -> None:
        if remote.get(path) is None:
            message = (
                f"The push of snapshot {name!r} to {remote.url} was given up by a clean, which may"
                " have removed what it had found there. Push it again."
            )
            raise RemoteError(message)

    try:
        _wait_for_cleans(remote)
        yield check
    except BaseException:
        with suppress(StowError):
            remote.remove(path, repeats=False)
        raise
    for listed in remote.list(folder):
        if listed.startswith(prefix):
            remote.remove(f"{folder}/{listed}")


@contextmanager
def clean_marked(remote: Remote) -> Iterator[list[Mark]]:
    """Mark a clean while the block runs; yield the marks of other cleans and of pushes."""
    path = _put(remote, f"{_CLEANS}/")
    try:
        yield [mark for mark in marks(remote) if mark.path != path]
    except BaseException:
        with suppress(StowError):
            remote.remove(path, repeats=False)
        raise
    remote.remove(path)


def marks(remote: Remote) -> list[Mark]:
    """Return all marks."""
    return [*_marks(remote, _PUSHES), *_marks(remote, _CLEANS)]


def _put(remote: Remote, prefix: str) -> str:
    machine = [*machine_id(), _pid_space()]
    body = {"machine": machine, "pid": os.getpid(), "began": _began(os.getpid())}
    path = f"{prefix}{uuid.uuid4().hex}.json"
    remote.put(path, json.dumps({**body, "since": time.strftime("%F %T")}).encode())
    return path


def _marks(remote: Remote, folder: str) -> list[Mark]:
    read = []
    for name in sorted(remote.list(folder)):
        body = remote.get(f"{folder}/{name}") if name.endswith(".json") else None
        if body is not None:  # else it is over by now
            snapshot = name.partition("/")[0] if folder == _PUSHES else ""
            read.append(Mark(f"{folder}/{name}", snapshot, *_owner(body)))
    return read


def _owner(body: bytes) -> tuple[str, bool | None]:
    """Return the process that made a mark, in words, and whether it is gone if that is known."""
    try:
        mark = json.loads(body)
        machine, pid, began = list(mark["machine"]), int(mark["pid"]), str(mark["began"])
        who = f"pid {pid} on {machine[0]} since {mark['since']}"
    except (LookupError, TypeError, ValueError):
        return "a process that its mark does not name", None
    is_here = machine == [*machine_id(), _pid_space()]
    return who, _began(pid) != began if is_here else None


def _began(pid: int) -> str:
    """Return when a process began, in ticks since the boot; "" if there is none."""
    fields = read_or_empty(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""  # the 22nd, of which two are before the ")"


def _pid_space() -> str:
    """Return what tells this process's numbers of processes from those of other containers."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _wait_for_cleans(remote: Remote) -> None:
    for pause in (*_PAUSES, None):
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
