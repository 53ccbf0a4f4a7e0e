"""Reads back what snapshots elsewhere list, and removes what none lists or a user names."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensorstow.base.errors import DamageError, LockedError, OptionError
from tensorstow.store.remote import Remote
from tensorstow.store.remote_marks import Mark, clean_marked, marks
from tensorstow.store.remote_objects import (
    KEY,
    StoredPart,
    aligned,
    in_threads,
    nowhere,
    object_names,
    reading,
)
from tensorstow.store.remote_snapshots import (
    check_name,
    find_snapshot,
    read_rank,
    snapshot_names,
    snapshot_of,
)

_PART = re.compile(r".*\.[0-9a-f]+\.part")
"""Matches a file that a killed push had not written to its end."""


@dataclass(frozen=True, slots=True)
class RemoteRemoval:
    """What is removed, in this order, and what stays."""

    snapshots: tuple[str, ...]
    """Names of the snapshots."""
    files: tuple[str, ...]
    """Lists, marks, and files that were not written to their end."""
    objects: tuple[str, ...]
    """Objects that no snapshot lists."""
    nbytes: int
    """The bytes of both."""
    kept_objects: int
    foreign: tuple[str, ...]
    """What has no name of an object or a list, and stays."""


def find_unlisted(remote: Remote, names: Sequence[str] = ()) -> RemoteRemoval:
    """Return what ``clean_remote`` would remove. A push under way makes it less."""
    return _plan(remote, names, marks(remote))


def clean_remote(remote: Remote, names: Sequence[str] = ()) -> RemoteRemoval:
    """Remove the snapshots ``names``, and the objects that no other snapshot lists.

    A snapshot that a killed push left unfinished is one too. Pushes that begin meanwhile wait
    ([Note: Marks]). Raises LockedError if a push is under way, OptionError if there is no such
    snapshot, DamageError or StoreFormatError if a list of another one cannot be read: nothing is
    removed then.
    """
    with clean_marked(remote) as references:
        _refuse_live(remote, references, names)
        removal = _plan(remote, names, references)
        for path in removal.files:  # the list of lists first: without it a snapshot is not there
            remote.remove(path)
        for _ in in_threads(remote.remove, removal.objects, size=lambda _: 0):
            pass
    return removal


def _refuse_live(remote: Remote, others: Sequence[Mark], names: Sequence[str]) -> None:
    for mark in others:
        if mark.is_gone or (mark.is_gone is None and mark.snapshot in names):
            continue
        if mark.snapshot:
            message = (
                f"A clean of {remote.url} was requested, and snapshot {mark.snapshot!r} is being"
                f" pushed there by {mark.who}. Wait until that is over. If that process was killed,"
                f" push the snapshot again, or give it up: tensorstow run clean {remote.url}"
                f" --snapshot {mark.snapshot} --yes"
            )
        else:
            message = (
                f"A clean of {remote.url} was requested, and it is being cleaned by {mark.who}."
                " Wait until that is over. If that process was killed, delete"
                f" {remote.url}/{mark.path}."
            )
        raise LockedError(message)


def _plan(remote: Remote, names: Sequence[str], all_marks: Iterable[Mark]) -> RemoteRemoval:
    # Objects before lists: an object that is uploaded between the two requests is not in question.
    objects, sizes = remote.list("objects"), remote.list("snapshots")
    lists = {path: snapshot_of(path) for path in sizes}
    left = [mark for mark in all_marks if mark.is_gone or mark.snapshot in names]
    _check_names(remote, names, {*lists.values(), *(m.snapshot for m in all_marks)})
    # Those of a snapshot in this order: NAME.json, NAME/rank-...
    removed = [p for p, name in sorted(lists.items()) if name in names or _PART.fullmatch(p)]
    remaining = [path for path in lists if path not in removed]
    listed = _listed(remote, {path: name for path in remaining if (name := lists[path])})
    unlisted = {
        name: nbytes
        for name, nbytes in objects.items()
        if _PART.fullmatch(name) or (KEY.fullmatch(name) and name not in listed)
    }
    foreign = [n for n in objects if n not in unlisted and n not in listed]
    marked = [f"{f}/{path}" for f in ("pushes", "cleans") for path in remote.list(f)]
    parts = [path for path in marked if _PART.fullmatch(path)]
    return RemoteRemoval(
        snapshots=tuple(sorted(set(names))),
        files=(*(f"snapshots/{path}" for path in removed), *(mark.path for mark in left), *parts),
        objects=tuple(f"objects/{name}" for name in sorted(unlisted)),
        nbytes=sum(unlisted.values()) + sum(sizes[path] for path in removed),
        kept_objects=len(objects) - len(unlisted) - len(foreign),
        foreign=(
            *(f"objects/{name}" for name in sorted(foreign)),
            *(f"snapshots/{path}" for path in sorted(remaining) if lists[path] is None),
        ),
    )


def _check_names(remote: Remote, names: Iterable[str], existing: Collection[str | None]) -> None:
    for name in names:
        check_name(name)
        if name not in existing:
            message = (
                f"The removal of snapshot {name!r} was requested, and {remote.url} does not have"
                f" it. It has: {', '.join(snapshot_names(remote)) or 'none'}."
            )
            raise OptionError(message)


def _listed(remote: Remote, lists: Mapping[str, str]) -> set[str]:
    """Return the names of the objects that lists have; raise if one of them cannot be read.

    ``lists``: the snapshots by the paths of their lists.
    """
    listed: set[str] = set()
    for path, name in lists.items():
        try:
            if "/" not in path:
                find_snapshot(remote, name)  # all of its ranks' lists exist
                continue
            body = remote.get(f"snapshots/{path}")
            with reading(remote.url, f"snapshots/{path}", body) as of_rank:
                listed.update(object_names(of_rank))
        except DamageError as error:
            message = (
                f"A clean of {remote.url} was requested, and nothing was removed: which objects"
                f" snapshot {name!r} needs is not known. {error} Or push it again, or give it up:"
                f" tensorstow run clean {remote.url} --snapshot {name} --yes"
            )
            raise DamageError(message) from error
    return listed


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
    for rank in range(len(snapshot.ranks)):
        parts += read_rank(remote, snapshot, rank, nowhere)[1]
    return parts
