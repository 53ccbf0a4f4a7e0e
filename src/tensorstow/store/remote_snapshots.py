"""Snapshots of stores elsewhere: in buckets and other places that fsspec reaches.

[Note: Remote snapshots] Under an address there are objects, each the bytes of one chunk or tensor,
and snapshots that list them. An object's name is a hash of the checksums that its store has of the
bytes, so a snapshot uploads what no earlier one has. Each rank writes a list of its own; the rank
that finds those of all ranks there writes the list of lists, which makes the snapshot visible.
Nothing is changed once it is written, so a reader needs no lock, and an upload that was killed goes
on with the objects that are missing. What is read back is compared with the checksums.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tensorstow.base.errors import DamageError, OptionError, RemoteError
from tensorstow.io.files import File
from tensorstow.store.records import Content, Extent, Generation
from tensorstow.store.remote import Remote
from tensorstow.store.remote_marks import push_marked
from tensorstow.store.remote_objects import (
    FORMAT,
    Place,
    StoredPart,
    check_format,
    entries,
    in_threads,
    naming_list,
    parts_of_store,
    read_entries,
    reading,
)
from tensorstow.store.rows import to_json
from tensorstow.store.store import Store

_NAME = re.compile(r"\w[\w.+=-]{0,127}", re.ASCII)
_LIST = re.compile(r"(?P<name>[^/]+?)(\.json|/rank-\d+-of-\d+\.json)")
"""Matches the path of a list below ``snapshots``."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """What a push or a pull moved."""

    snapshot: str
    step: int
    moved_bytes: int
    total_bytes: int
    is_complete: bool = True
    """Whether the snapshot is visible: all ranks have written theirs."""


def check_name(name: str) -> None:
    """Raise OptionError for a snapshot's name that cannot be a part of an address."""
    if not _NAME.fullmatch(name) or name.endswith(".json"):
        message = (
            f"A snapshot {name!r} was to be copied: elsewhere its name is a part of an address. Use"
            " letters, digits and . _ + = - only, begin with a letter or a digit, and do not end"
            " with .json."
        )
        raise OptionError(message)


def push(
    remote: Remote,
    files: Sequence[File],
    generation: Generation,
    name: str,
    *,
    rank: int = 0,
    world: int = 1,
    commit: str | None = None,
) -> Transferred:
    """Upload what ``remote`` lacks of ``generation`` of one rank, as a part of snapshot ``name``.

    ``commit``: the id that all ranks have of it. Memory: two copies of eight chunks, of 512 MiB
    together or one chunk. Raises OptionError if another commit has that name there, LockedError if
    one is being pushed by that name, RemoteError if a request fails in spite of repeats.
    """
    check_name(name)
    parts = parts_of_store(generation, files)
    body = _as_json(generation, parts, rank, world, commit)
    digest = hashlib.sha256(body).hexdigest()
    with push_marked(remote, name, rank, world, commit=commit, digest=digest) as is_marked:
        path = _path_of(name, rank, world)
        _refuse_other(remote, name, path, body)
        existing = remote.list("objects")
        # By name: chunks of equal checksums are one object.
        missing = {part.key: part for part in parts if existing.get(part.key) != part.nbytes}

        def upload(part: StoredPart) -> None:
            remote.put(f"objects/{part.key}", part.read(files))

        for _ in in_threads(upload, missing.values(), size=lambda part: part.nbytes):
            pass
        if not is_marked() and remote.get(path) != body:  # that of another push of the same
            message = (
                f"The push of snapshot {name!r} to {remote.url} was given up by a clean, which may"
                " have removed what it had found there. Push it again."
            )
            raise RemoteError(message)
        _refuse_other(remote, name, path, body)  # again: another run may have pushed meanwhile
        # After all objects: whoever finds a list finds what it names.
        remote.put(path, body)
        is_complete = _complete(remote, name, generation.step, world, commit)
    return Transferred(
        name,
        generation.step,
        sum(part.nbytes for part in missing.values()),
        sum(part.nbytes for part in parts),
        is_complete,
    )


def _refuse_other(remote: Remote, name: str, path: str, body: bytes) -> None:
    """Raise OptionError if a snapshot's list of a rank is of another commit than ``body``."""
    # A complete snapshot that has no list of this rank is of another number of ranks.
    before, listed = remote.get(path), remote.get(f"snapshots/{name}.json")
    if listed is not None if before is None else before != body and _is_list(before):
        _refuse_name(remote, name)


def _complete(remote: Remote, name: str, step: int, world: int, commit: str | None) -> bool:
    """Make a snapshot visible if all ranks have written theirs; return whether they have."""
    digests = []
    for rank in range(world):
        body = remote.get(_path_of(name, rank, world))
        if body is None or not _is_list(body) or json.loads(body)["commit"] != commit:
            return False
        digests.append(hashlib.sha256(body).hexdigest())
    path = f"snapshots/{name}.json"
    listed = {"format": FORMAT, "step": step, "ranks": digests}
    before = remote.get(path)
    if before is not None and _is_list(before, "ranks"):
        # Early lists have no format.
        if {"format": FORMAT, **json.loads(before)} != listed:
            _refuse_name(remote, name)
        return True
    remote.put(path, to_json(listed, "list of ranks").encode())
    return True


def _is_list(body: bytes, key: str = "commit") -> bool:
    """Return whether a list was written to its end: what was cut off is written anew."""
    try:
        return key in json.loads(body)
    except (TypeError, ValueError):
        return False


def _refuse_name(remote: Remote, name: str) -> NoReturn:
    message = (
        f"The snapshot {name!r} was to be written to {remote.url}, and another commit has that name"
        f" there. Choose another name, or remove that one first: tensorstow run clean {remote.url}"
        f" --snapshot {name} --yes"
    )
    raise OptionError(message)


@dataclass(frozen=True, slots=True)
class RemoteSnapshot:
    """A snapshot elsewhere."""

    name: str
    ranks: Sequence[Mapping[str, Any]]
    """What each rank has written of it, as JSON."""


def _path_of(name: str, rank: int, world: int) -> str:
    """Return the path of a rank's list."""
    return f"snapshots/{name}/rank-{rank}-of-{world}.json"


def snapshot_of(path: str) -> str | None:
    """Return the snapshot whose list has this path below ``snapshots``; None if it is no list."""
    match = _LIST.fullmatch(path)
    return match["name"] if match is not None and _NAME.fullmatch(match["name"]) else None


def snapshot_names(remote: Remote) -> list[str]:
    """Return the names of the snapshots that all ranks have written."""
    names = ((path, snapshot_of(path)) for path in remote.list("snapshots"))
    return sorted(name for path, name in names if name is not None and "/" not in path)


def unfinished_snapshots(remote: Remote) -> dict[str, list[str]]:
    """Return the lists of ranks by the names of snapshots that not all ranks have written."""
    lists: dict[str, list[str]] = {}
    for path in sorted(remote.list("snapshots")):
        name = snapshot_of(path)
        if name is not None and "/" in path:
            lists.setdefault(name, []).append(path.rpartition("/")[2])
    for name in snapshot_names(remote):
        lists.pop(name, None)
    return lists


def newest_snapshot(remote: Remote) -> str:
    """Return the name of the snapshot with the highest step; raise OptionError if there is none."""
    steps = {}
    for name in snapshot_names(remote):
        path = f"snapshots/{name}.json"
        with reading(remote.url, path, remote.get(path)) as listed:
            steps[name] = int(listed["step"])
    if not steps:
        message = (
            f"The newest snapshot was requested, and {remote.url} has none that all ranks have"
            " written."
        )
        raise OptionError(message)
    return max(steps, key=lambda name: steps[name])


def find_snapshot(remote: Remote, name: str) -> RemoteSnapshot:
    """Return a snapshot.

    Raises OptionError if there is none of that name, DamageError if its lists are damaged.
    """
    check_name(name)
    path = f"snapshots/{name}.json"
    listed = remote.get(path)
    if listed is None:
        message = (
            f"The snapshot {name!r} was requested, and {remote.url} does not have it. It has:"
            f" {', '.join(snapshot_names(remote)) or 'none'}. One that not all ranks have written"
            " is not there yet."
        )
        raise OptionError(message)
    with reading(remote.url, path, listed) as of_ranks:
        digests = list(of_ranks["ranks"])
    ranks = []
    for rank, digest in enumerate(digests):
        path = _path_of(name, rank, len(digests))
        with reading(remote.url, path, remote.get(path), digest) as of_rank:
            ranks.append(of_rank)
    return RemoteSnapshot(name, ranks)


def read_rank(
    remote: Remote, snapshot: RemoteSnapshot, rank: int, place: Place
) -> tuple[Content, list[StoredPart]]:
    """Return what one rank has committed in extents of ``place``, and its parts."""
    path, listed = _path_of(snapshot.name, rank, len(snapshot.ranks)), snapshot.ranks[rank]
    with naming_list(remote.url, path):
        check_format(listed, remote.url, path)
        chunks, tensors, parts = read_entries(listed, place)
        step, layout = listed["step"], listed["layout"]
        return Content(step, layout, listed["hyper"], listed["extra"], chunks, tensors), parts


def pull(remote: Remote, snapshot: RemoteSnapshot, rank: int, store: Store) -> Transferred:
    """Download one rank's part of a snapshot to an empty store; it is its newest commit there.

    Nothing is moved if the store has the snapshot already. Memory: as of a push. Raises OptionError
    if the store has commits, DamageError if the bytes are not those that were written, RemoteError
    if a request fails in spite of repeats.
    """
    if generations := store.generations():
        newest = generations[-1]
        if snapshot.name in newest.names and newest.step == snapshot.ranks[rank].get("step"):
            return Transferred(snapshot.name, newest.step, 0, newest.bytes)
        message = (
            f"The snapshot {snapshot.name!r} was to be copied to {store.directories[0]}, which has"
            " other commits. Name an empty directory."
        )
        raise OptionError(message)
    held: list[Extent] = []

    def place(nbytes: int) -> Extent:
        held.append(store.allocate(nbytes))
        return held[-1]

    try:
        content, parts = read_rank(remote, snapshot, rank, place)

        def download(part: StoredPart) -> None:
            source = f"objects/{part.key}"
            data = remote.get(source)
            if data is None:
                message = (
                    f"{remote.url}/{source} is missing, which snapshot {snapshot.name!r} has. Take"
                    " another snapshot."
                )
                raise DamageError(message)
            part.write(store.files, data, f"{remote.url}/{source}")

        for _ in in_threads(download, parts, size=lambda part: part.nbytes):
            pass
        store.commit(content)
        store.add_snapshot(snapshot.name)
    finally:
        # A generation refers to them if the commit was made; else they become free.
        for extent in held:
            store.release(extent)
    nbytes = sum(part.nbytes for part in parts)
    return Transferred(snapshot.name, content.step, nbytes, nbytes)


def _as_json(
    generation: Generation, parts: Sequence[StoredPart], rank: int, world: int, commit: str | None
) -> bytes:
    """Return what one rank writes of a snapshot; parts are those of chunks, then of tensors."""
    listed = {
        "format": FORMAT,
        "rank": rank,
        "world": world,
        "commit": commit,
        "step": generation.step,
        "layout": generation.layout,
        "hyper": generation.hyper,
        "extra": generation.extra,
        **entries(generation, parts),
    }
    return to_json(listed, "list of a snapshot").encode()
