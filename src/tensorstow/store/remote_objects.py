"""Objects elsewhere: each has the bytes of one chunk or tensor, and checksums that it must match.

[Note: Objects] An object's name is a hash of the checksums that its store has of the bytes, so a
chunk that is there already need not be read to be found. A tensor has one checksum, which is too
short for a name: a hash of its bytes is.
"""

import hashlib
import json
import re
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, StoreFormatError, StowError
from tensorstow.io.files import File
from tensorstow.store.checksums import PIECE_BYTES, block_checksums, weight_checksums
from tensorstow.store.records import (
    ChunkRecord,
    ChunkShape,
    Extent,
    Generation,
    TensorRecord,
    chunk_shapes,
)
from tensorstow.store.tensors import plain_bytes

_T = TypeVar("_T")
Place = Callable[[int], Extent]
"""Returns a free extent of so many bytes."""
FORMAT = 1
KEY = re.compile(r"[0-9a-f]{64}")
"""Matches the name of an object."""
_THREADS = 8
_BYTES_IN_FLIGHT = 512 << 20


class StoredPart:
    """A chunk or a tensor of a store, which is one object elsewhere."""

    def __init__(self, name: str, extent: Extent, nbytes: int, key: str, sums: object) -> None:
        """Describe the first ``nbytes`` of an extent; ``key``: the object's name."""
        self.name, self.nbytes, self.key = name, nbytes, key
        self.sums = sums
        """Its checksums: parts of one name that differ in them are not the same."""
        self._file, self._offset = extent.file, extent.offset

    def is_intact(self, memory: torch.Tensor) -> bool:
        """Return whether bytes are those that were written."""
        raise NotImplementedError

    def read(self, files: Sequence[File]) -> bytes:
        """Return its bytes; raise DamageError if they are not those that were written."""
        memory = read_bytes(files[self._file], self._offset, self.nbytes)
        self.verify(memory, str(files[self._file].path))
        return memory.numpy().tobytes()

    def write(self, files: Sequence[File], data: bytes, source: str) -> None:
        """Write bytes that came from ``source``; raise DamageError if they are others."""
        memory = aligned(data)
        self.verify(memory, source)
        if data:
            files[self._file].write(memory, self._offset).wait()

    def verify(self, memory: torch.Tensor, source: str) -> None:
        """Raise DamageError unless bytes are those that were written."""
        if len(memory) != self.nbytes or not self.is_intact(memory):
            message = (
                f"{self.name} was read from {source}: it is not as it was written, its checksum"
                " does not fit. Take another snapshot; or, if it is an object elsewhere, delete it"
                " and push again from a run that has it."
            )
            raise DamageError(message)


class _ChunkPart(StoredPart):
    """A chunk: its extent, or its weights alone if its states are blank."""

    def __init__(self, record: ChunkRecord, shape: ChunkShape, key: str) -> None:
        self._record, self._shape = record, shape
        self._begin = begin = shape.weight_offset if record.blank else 0
        extent = replace(record.extent, offset=record.extent.offset + begin)
        sums = (record.blank, record.checksums, record.weight_checksums)
        super().__init__(f"Chunk {record.chunk}", extent, shape.nbytes - begin, key, sums)

    def is_intact(self, memory: torch.Tensor) -> bool:
        """Return whether bytes are those that were written."""
        record, shape, address = self._record, self._shape, memory.data_ptr()
        weights = weight_checksums(shape, address + shape.weight_offset - self._begin)
        if weights != record.weight_checksums:
            return False
        return record.blank or block_checksums(shape, address) == record.checksums


class _TensorPart(StoredPart):
    """A tensor, which is named by its bytes."""

    def __init__(self, record: TensorRecord, key: str) -> None:
        self._record = record
        subject = f"{record.kind} tensor {record.name!r}"
        super().__init__(subject, record.extent, plain_bytes(record), key, record.checksum)

    def is_intact(self, memory: torch.Tensor) -> bool:
        """Return whether bytes are those that were written."""
        checksum = 0
        for start in range(0, len(memory), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            checksum = _native.checksum(piece.data_ptr(), len(piece), checksum)
        return checksum == self._record.checksum


def read_bytes(file: File, offset: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a file in new memory."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if nbytes:
        file.read(memory, offset).wait()
    return memory


def aligned(data: bytes) -> torch.Tensor:
    """Return a copy of bytes whose address direct I/O and checksums take."""
    memory = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    if data:
        memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return memory


def parts_of_store(generation: Generation, files: Sequence[File]) -> list[StoredPart]:
    """Return the parts of a generation: chunks, then tensors, which are read for their names."""
    shapes = chunk_shapes(generation.layout)
    parts: list[StoredPart] = []
    for chunk in generation.chunks:
        shape = shapes[chunk.chunk]
        # The shape says how the bytes lie that the checksums are of.
        facts = (repr(shape), chunk.blank, chunk.checksums, chunk.weight_checksums)
        key = hashlib.sha256(repr(facts).encode()).hexdigest()
        parts.append(_ChunkPart(chunk, shape, key))
    for record in generation.tensors:
        unnamed = _TensorPart(record, "")
        key = hashlib.sha256(unnamed.read(files)).hexdigest()
        parts.append(_TensorPart(record, key))
    return parts


def entries(generation: Generation, parts: Sequence[StoredPart]) -> dict[str, Any]:
    """Return chunks and tensors as a list elsewhere has them: extents are the store's alone."""
    keys = iter([part.key for part in parts])
    return {
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


def read_entries(
    listed: Mapping[str, Any], place: Place
) -> tuple[list[ChunkRecord], list[TensorRecord], list[StoredPart]]:
    """Return the chunks and tensors that a rank's list has, and both as parts.

    Args:
        listed: The list, as JSON. A ``ValueError`` or ``LookupError`` says what is wrong with it.
        place: Returns the extent of a part that has so many bytes.
    """
    shapes = chunk_shapes(listed["layout"])
    chunks = [_chunk(entry, shapes, place) for entry in listed["chunks"]]
    tensors = [_tensor(entry, place) for entry in listed["tensors"]]
    keys = object_names(listed)
    parts: list[StoredPart] = [
        *(_ChunkPart(r, shapes[r.chunk], key) for r, key in zip(chunks, keys, strict=False)),
        *(_TensorPart(r, k) for r, k in zip(tensors, keys[len(chunks) :], strict=True)),
    ]
    return chunks, tensors, parts


def object_names(listed: Mapping[str, Any]) -> list[str]:
    """Return the names of the objects that a rank's list has, in its order."""
    return [_key(entry) for entry in (*listed["chunks"], *listed["tensors"])]


def nowhere(nbytes: int) -> Extent:
    """Return an extent of no file, for parts that are only verified."""
    return Extent(0, 0, nbytes)


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
    record = TensorRecord(
        entry["kind"], entry["name"], entry["dtype"], shape, nowhere(0), entry["checksum"]
    )
    return replace(record, extent=place(plain_bytes(record)))


def _key(entry: Mapping[str, Any]) -> str:
    key: str = entry["object"]
    if not KEY.fullmatch(key):  # it becomes a part of a path
        message = f"{key!r} is no name of an object"
        raise ValueError(message)
    return key


def in_threads(
    act: Callable[[_T], object], items: Iterable[_T], size: Callable[[_T], int]
) -> Iterator[_T]:
    """Call ``act`` with each item, on eight threads; yield each item when its call is over.

    Args:
        act: The call. Its first error is raised when the calls that run are over.
        items: The arguments of the calls, in their order.
        size: Returns the bytes that an item's call takes. Calls run at once that take no more than
            512 MiB, and one of any size runs alone.
    """
    running: deque[tuple[Future[object], _T]] = deque()
    in_flight = 0
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="tensorstow-remote") as threads:
        try:
            for item in items:
                while running and (
                    len(running) == _THREADS or in_flight + size(item) > _BYTES_IN_FLIGHT
                ):
                    in_flight -= size(running[0][1])
                    yield _finished(*running.popleft())
                try:
                    running.append((threads.submit(act, item), item))
                except RuntimeError:  # the interpreter ends, and no thread works any more
                    act(item)
                    yield item
                else:
                    in_flight += size(item)
            while running:
                yield _finished(*running.popleft())
        finally:
            for future, _ in running:
                # Calls that have begun end before the executor's block does.
                future.cancel()


def _finished(future: Future[object], item: _T) -> _T:
    future.result()
    return item


@contextmanager
def reading(
    url: str, path: str, body: bytes | None, digest: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a list, of which ``body`` was read; raise errors of the block as DamageError.

    ``digest``: of what was written, if that is known. Raises StoreFormatError if another version
    wrote the list.
    """
    with naming_list(url, path):
        if digest is not None and (body is None or hashlib.sha256(body).hexdigest() != digest):
            message = "it is not the one that the snapshot has"
            raise ValueError(message)
        listed = json.loads(body or b"")
        check_format(listed, url, path)
        yield listed


def check_format(listed: Mapping[str, Any], url: str, path: str) -> None:
    """Raise StoreFormatError for a list that another version wrote."""
    if (number := listed.get("format", FORMAT)) != FORMAT:
        message = (
            f"{url}/{path} has format {number!r}, and this version reads {FORMAT}. Take the version"
            " that wrote it, or a newer one."
        )
        raise StoreFormatError(message)


@contextmanager
def naming_list(url: str, path: str) -> Iterator[None]:
    """Raise errors of reading a list as DamageError."""
    try:
        yield
    except StowError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        message = (
            f"{url}/{path} cannot be read ({error!r}): something else wrote it, or it is damaged."
            " Take another snapshot."
        )
        raise DamageError(message) from error
