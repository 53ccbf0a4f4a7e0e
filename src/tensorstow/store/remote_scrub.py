"""Reads back all objects that snapshots elsewhere list, and reports what is missing or damaged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tensorstow.base.errors import DamageError
from tensorstow.store.remote import Remote
from tensorstow.store.remote_objects import (
    StoredPart,
    aligned,
    in_threads,
    nowhere,
    read_entries,
    reading,
)
from tensorstow.store.remote_snapshots import find_snapshot, snapshot_names


@dataclass(frozen=True, slots=True)
class RemoteDamage:
    """An object or a list that is missing, or is not as it was written."""

    description: str
    snapshots: tuple[str, ...]
    """The snapshots that cannot be pulled because of it."""

    def __str__(self) -> str:
        """Return one line for people."""
        return f"{self.description} (snapshot {', '.join(self.snapshots)})"


@dataclass(frozen=True, slots=True)
class RemoteProgress:
    """The progress of reading objects."""

    done_bytes: int
    total_bytes: int
    damages: tuple[RemoteDamage, ...]
    """The damages since the previous report."""


def scrub_remote(remote: Remote, name: str | None = None) -> Iterator[RemoteProgress]:
    """Read back the objects of snapshot ``name``, or of all, each once. Memory: as of a push.

    Raises OptionError if there is no such snapshot, StoreFormatError if a newer version wrote one,
    RemoteError if a request fails in spite of repeats.
    """
    names = snapshot_names(remote) if name is None else [name]
    parts: dict[tuple[str, int, object], tuple[StoredPart, list[str]]] = {}
    lists: list[RemoteDamage] = []
    for snapshot in names:
        try:
            for part in _parts(remote, snapshot):
                _, users = parts.setdefault((part.key, part.nbytes, part.sums), (part, []))
                if snapshot not in users:
                    users.append(snapshot)
        except DamageError as error:
            lists.append(RemoteDamage(str(error), (snapshot,)))
    total, done = sum(part.nbytes for part, _ in parts.values()), 0
    yield RemoteProgress(0, total, tuple(lists))
    flaws: dict[StoredPart, str] = {}

    def verify(used: tuple[StoredPart, list[str]]) -> None:
        part, _ = used
        path = f"objects/{part.key}"
        data = remote.get(path)
        try:
            if data is None:
                flaws[part] = f"{part.name}: {remote.url}/{path} is missing"
            else:
                part.verify(aligned(data), f"{remote.url}/{path}")
        except DamageError as error:
            flaws[part] = str(error)

    for part, users in in_threads(verify, parts.values(), size=lambda used: used[0].nbytes):
        done += part.nbytes
        flaw = flaws.pop(part, None)
        damages = () if flaw is None else (RemoteDamage(flaw, tuple(users)),)
        yield RemoteProgress(done, total, damages)


def _parts(remote: Remote, name: str) -> Sequence[StoredPart]:
    snapshot = find_snapshot(remote, name)
    parts: list[StoredPart] = []
    for rank, listed in enumerate(snapshot.ranks):
        path = f"snapshots/{name}/rank-{rank}-of-{len(snapshot.ranks)}.json"
        with reading(remote.url, path):
            parts += read_entries(listed, nowhere)[2]
    return parts
