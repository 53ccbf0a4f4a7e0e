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
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, OptionError, StoreFormatError, StowError
from tensorstow.io.files import File
from tensorstow.store.checksums import PIECE_BYTES, block_checksums, weight_checksums
from tensorstow.store.records import (
    ChunkRecord,
    ChunkShape,
    Content,
    Extent,
    Generation,
    TensorRecord,
    chunk_shapes,
)
from tensorstow.store.remote import Remote
from tensorstow.store.rows import to_json
from tensorstow.store.store import Store
from tensorstow.store.tensors import plain_bytes

_T = TypeVar("_T")
Place = Callable[[int], Extent]
"""Returns a free extent of so many bytes."""
_FORMAT = 1
_THREADS = 8
_KEY = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"\w[\w.+=-]{0,127}", re.ASCII)


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
    if not _NAME.fullmatch(name):
        message = (
            f"A snapshot {name!r} was to be copied: elsewhere its name is a part of an address. Use"
            " letters, digits and . _ + = - only, and begin with a letter or a digit."
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

    ``commit``: the id that all ranks have of it. Memory: two copies of eight chunks. Raises
    OptionError if another commit has that name there, RemoteError if a request fails in spite of
    repeats.
    """
    check_name(name)
    path = f"snapshots/{name}/rank-{rank}-of-{world}.json"
    before, listed = remote.get(path), remote.get(f"snapshots/{name}.json")
    shapes = chunk_shapes(generation.layout)
    parts: list[_Part] = [
        *(_ChunkPart(files[r.extent.file], r, shapes[r.chunk]) for r in generation.chunks),
        *(_TensorPart(files[r.extent.file], r) for r in generation.tensors),
    ]
    body = _as_json(generation, parts, rank, world, commit)
    is_other = listed is not None if before is None else before != body and _is_list(before)
    if is_other:
        _refuse_name(remote, name)
    existing = remote.list("objects")
    missing = {part.key: part for part in parts if existing.get(part.key) != part.nbytes}

    def upload(part: _Part) -> None:
        remote.put(f"objects/{part.key}", part.read())

    _in_threads(upload, missing.values())
    remote.put(path, body)
    return Transferred(
        name,
        generation.step,
        sum(part.nbytes for part in missing.values()),
        sum(part.nbytes for part in parts),
        _complete(remote, name, generation.step, world, commit),
    )


def _complete(remote: Remote, name: str, step: int, world: int, commit: str | None) -> bool:
    """Make a snapshot visible if all ranks have written theirs; return whether they have."""
    digests = []
    for rank in range(world):
        body = remote.get(f"snapshots/{name}/rank-{rank}-of-{world}.json")
        if body is None or not _is_list(body) or json.loads(body)["commit"] != commit:
            return False
        digests.append(hashlib.sha256(body).hexdigest())
    path = f"snapshots/{name}.json"
    listed = to_json({"step": step, "ranks": digests}, "list of ranks").encode()
    if (before := remote.get(path)) not in {None, listed} and _is_list(before or b"", "ranks"):
        _refuse_name(remote, name)
    remote.put(path, listed)
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
        f" there. Choose another name; or delete {remote.url}/snapshots/{name}.json and the folder"
        f" {remote.url}/snapshots/{name} first."
    )
    raise OptionError(message)


@dataclass(frozen=True, slots=True)
class RemoteSnapshot:
    """A snapshot elsewhere."""

    name: str
    ranks: Sequence[Mapping[str, Any]]
    """What each rank has written of it, as JSON."""


def snapshot_names(remote: Remote) -> list[str]:
    """Return the names of the snapshots that all ranks have written."""
    names = (n for n in remote.list("snapshots") if "/" not in n and n.endswith(".json"))
    return sorted(name.removesuffix(".json") for name in names)


def newest_snapshot(remote: Remote) -> str:
    """Return the name of the snapshot with the highest step; raise OptionError if there is none."""
    steps = {}
    for name in snapshot_names(remote):
        path = f"snapshots/{name}.json"
        with _reading(remote.url, path):
            steps[name] = int(json.loads(remote.get(path) or b"")["step"])
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
    listed = remote.get(f"snapshots/{name}.json")
    if listed is None:
        message = (
            f"The snapshot {name!r} was requested, and {remote.url} does not have it. It has:"
            f" {', '.join(snapshot_names(remote)) or 'none'}. One that not all ranks have written"
            " is not there yet."
        )
        raise OptionError(message)
    ranks = []
    with _reading(remote.url, f"snapshots/{name}.json"):
        digests = list(json.loads(listed)["ranks"])
    for rank, digest in enumerate(digests):
        path = f"snapshots/{name}/rank-{rank}-of-{len(digests)}.json"
        body = remote.get(path)
        with _reading(remote.url, path):
            if body is None or hashlib.sha256(body).hexdigest() != digest:
                message = "it is not the one that the snapshot has"
                raise ValueError(message)
            ranks.append(json.loads(body))
    return RemoteSnapshot(name, ranks)


def pull(remote: Remote, snapshot: RemoteSnapshot, rank: int, store: Store) -> Transferred:
    """Download one rank's part of a snapshot to an empty store; it is its newest commit there.

    Nothing is moved if the store has the snapshot already.
    Memory: two copies of eight chunks. Raises OptionError if the store has commits, DamageError if
    the bytes are not those that were written, RemoteError if a request fails in spite of repeats.
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
    path = f"snapshots/{snapshot.name}/rank-{rank}-of-{len(snapshot.ranks)}.json"
    held: list[Extent] = []

    def place(nbytes: int) -> Extent:
        held.append(store.allocate(nbytes))
        return held[-1]

    try:
        with _reading(remote.url, path):
            listed = snapshot.ranks[rank]
            if listed["format"] != _FORMAT:
                message = (
                    f"{remote.url}/{path} has format {listed['format']!r}, and this version reads"
                    f" {_FORMAT}. Take the version that wrote it, or a newer one."
                )
                raise StoreFormatError(message)
            layout = listed["layout"]
            shapes = chunk_shapes(layout)
            chunks = [_chunk(entry, shapes, place) for entry in listed["chunks"]]
            tensors = [_tensor(entry, place) for entry in listed["tensors"]]
            keys = [_key(entry) for entry in (*listed["chunks"], *listed["tensors"])]
            parts = [
                *(_ChunkPart(store.files[r.extent.file], r, shapes[r.chunk]) for r in chunks),
                *(_TensorPart(store.files[r.extent.file], r, "") for r in tensors),
            ]
            step, hyper, extra = listed["step"], listed["hyper"], listed["extra"]

        def download(part: tuple[_Part, str]) -> None:
            source = f"objects/{part[1]}"
            data = remote.get(source)
            if data is None:
                message = (
                    f"{remote.url}/{source} is missing, which snapshot {snapshot.name!r} has. Take"
                    " another snapshot."
                )
                raise DamageError(message)
            part[0].write(data, f"{remote.url}/{source}")

        _in_threads(download, zip(parts, keys, strict=True))
        store.commit(Content(step, layout, hyper, extra, chunks, tensors))
        store.add_snapshot(snapshot.name)
    finally:
        for extent in held:
            store.release(extent)
    nbytes = sum(part.nbytes for part in parts)
    return Transferred(snapshot.name, step, nbytes, nbytes)


class _Part:
    """A chunk or a tensor of a store, which is one object elsewhere."""

    def __init__(self, what: str, file: File, offset: int, nbytes: int, key: str | None) -> None:
        """Begin at ``offset`` of ``file``; ``key``: the object's name, None: that of its bytes."""
        self.nbytes = nbytes
        self._what, self._file, self._offset = what, file, offset
        self.key = self._hash_bytes() if key is None else key

    def is_intact(self, memory: torch.Tensor) -> bool:
        """Return whether bytes are those that were written."""
        raise NotImplementedError

    def read(self) -> bytes:
        """Return its bytes; raise DamageError if they are not those that were written."""
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        if self.nbytes:
            self._file.read(memory, self._offset).wait()
        self._check(memory, str(self._file.path))
        return memory.numpy().tobytes()

    def write(self, data: bytes, source: str) -> None:
        """Write bytes that came from ``source``; raise DamageError if they are others."""
        memory = torch.empty(len(data), dtype=torch.uint8, device="cpu")
        if data:
            memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._check(memory, source)
        if data:
            self._file.write(memory, self._offset).wait()

    def _hash_bytes(self) -> str:
        return hashlib.sha256(self.read()).hexdigest()

    def _check(self, memory: torch.Tensor, source: str) -> None:
        if len(memory) != self.nbytes or not self.is_intact(memory):
            message = (
                f"{self._what} was read from {source}: it is not as it was written, its checksum"
                " does not fit. Take another snapshot; or, if it is an object elsewhere, delete it"
                " and push again from a run that has it."
            )
            raise DamageError(message)


class _ChunkPart(_Part):
    """A chunk: its extent, or its weights alone if its states are blank."""

    def __init__(self, file: File, record: ChunkRecord, shape: ChunkShape) -> None:
        """Name it by its checksums, so that what is there already need not be read."""
        self._record, self._shape = record, shape
        self._begin = shape.weight_offset if record.blank else 0
        facts = (repr(shape), record.blank, record.checksums, record.weight_checksums)
        key = hashlib.sha256(repr(facts).encode()).hexdigest()
        offset = record.extent.offset + self._begin
        super().__init__(f"Chunk {record.chunk}", file, offset, shape.nbytes - self._begin, key)

    def is_intact(self, memory: torch.Tensor) -> bool:
        """Return whether bytes are those that were written."""
        record, shape, address = self._record, self._shape, memory.data_ptr()
        weights = weight_checksums(shape, address + shape.weight_offset - self._begin)
        if weights != record.weight_checksums:
            return False
        return record.blank or block_checksums(shape, address) == record.checksums


class _TensorPart(_Part):
    """A tensor, which is named by its bytes: they have one checksum, too short for a name."""

    def __init__(self, file: File, record: TensorRecord, key: str | None = None) -> None:
        self._record = record
        what = f"{record.kind} tensor {record.name!r}"
        super().__init__(what, file, record.extent.offset, plain_bytes(record), key)

    def is_intact(self, memory: torch.Tensor) -> bool:
        """Return whether bytes are those that were written."""
        checksum = 0
        for start in range(0, len(memory), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            checksum = _native.checksum(piece.data_ptr(), len(piece), checksum)
        return checksum == self._record.checksum


def _as_json(
    generation: Generation, parts: Sequence[_Part], rank: int, world: int, commit: str | None
) -> bytes:
    """Return what one rank writes of a snapshot; parts are those of chunks, then of tensors."""
    keys = iter([part.key for part in parts])
    listed = {
        "format": _FORMAT,
        "rank": rank,
        "world": world,
        "commit": commit,
        "step": generation.step,
        "layout": generation.layout,
        "hyper": generation.hyper,
        "extra": generation.extra,
        "chunks": [
            {
                "chunk": record.chunk,
                "blank": record.blank,
                "checksums": b64encode(record.checksums).decode(),
                "weight_checksums": b64encode(record.weight_checksums).decode(),
                "object": next(keys),
            }
            for record in generation.chunks
        ],
        "tensors": [
            {
                "kind": record.kind,
                "name": record.name,
                "dtype": record.dtype,
                "shape": record.shape,
                "checksum": record.checksum,
                "object": next(keys),
            }
            for record in generation.tensors
        ],
    }
    return to_json(listed, "list of a snapshot").encode()


def _chunk(entry: Mapping[str, Any], shapes: Sequence[ChunkShape], place: Place) -> ChunkRecord:
    return ChunkRecord(
        entry["chunk"],
        place(shapes[entry["chunk"]].nbytes),
        entry["blank"],
        b64decode(entry["checksums"], validate=True),
        b64decode(entry["weight_checksums"], validate=True),
    )


def _tensor(entry: Mapping[str, Any], place: Place) -> TensorRecord:
    shape = tuple(entry["shape"])
    nowhere = Extent(0, 0, 0)
    record = TensorRecord(
        entry["kind"], entry["name"], entry["dtype"], shape, nowhere, entry["checksum"]
    )
    return replace(record, extent=place(plain_bytes(record)))


def _key(entry: Mapping[str, Any]) -> str:
    key: str = entry["object"]
    if not _KEY.fullmatch(key):  # it becomes a part of a path
        message = f"{key!r} is no name of an object"
        raise ValueError(message)
    return key


def _in_threads(act: Callable[[_T], None], items: Iterable[_T]) -> None:
    """Call ``act`` with each item, on several threads; raise the first error when all are over."""
    running: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="tensorstow-remote") as threads:
        try:
            for item in items:
                if len(running) == _THREADS:
                    running.popleft().result()
                try:
                    running.append(threads.submit(act, item))
                except RuntimeError:  # the interpreter ends, and no thread works any more
                    act(item)
            while running:
                running.popleft().result()
        finally:
            for each in running:
                each.cancel()


@contextmanager
def _reading(url: str, path: str) -> Iterator[None]:
    """Raise errors of reading a list as DamageError."""
    try:
        yield
    except StowError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        message = (
            f"{url}/{path} cannot be read ({error!r}): something else wrote it, or it is damaged."
            " Take another snapshot."
        )
        raise DamageError(message) from error
