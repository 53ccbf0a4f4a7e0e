"""Extents, chunks, tensors and generations, as values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorstow.base.errors import StoreFormatError
from tensorstow.base.sizes import round_up

PAGE = 4096
"""Extents and the streams in them begin on multiples of this, and are padded to it."""


HEADER_BYTES = 3 * PAGE
"""What a data file begins with: its label and two heads, a page each."""


MOST_ELEMENTS = 1 << 48
"""More than a model has."""


def padded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a whole page."""
    return round_up(nbytes, PAGE)


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A range of bytes of one data file, allocated, referred to and freed as a whole."""

    file: int
    """Which of the store's files."""
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The offset of its end."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Where one chunk of a generation is, and the checksums of its blocks."""

    chunk: int
    """Its number: the place of its shape in ``layout["chunks"]``."""
    extent: Extent
    blank: bool
    """Its states are zero by definition: of the extent only the weight stream is valid."""
    checksums: bytes
    """A little-endian u32 per block, over the states of that block, all streams in order."""
    weight_checksums: bytes
    """The same for the weight stream."""


@dataclass(frozen=True, slots=True)
class StreamShape:
    """``bytes`` for each ``per`` elements; 0 bytes where there is no such stream."""

    bytes: int
    per: int

    def span(self, elements: int) -> int:
        """Return the bytes that ``elements`` elements take; a group that has begun counts whole."""
        return -(-elements // self.per) * self.bytes


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """How the bytes of a chunk lie in its extent: the streams in turn, then the weights.

    Each stream is padded to a page.
    """

    elements: int
    block: int
    """Elements under one checksum, a multiple of 32 so that no group is cut."""
    streams: tuple[StreamShape, ...]
    weight: StreamShape

    @property
    def blocks(self) -> int:
        """The number of checksums."""
        return -(-self.elements // self.block)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole extent."""
        return sum(padded(s.span(self.elements)) for s in (*self.streams, self.weight))

    @property
    def weight_offset(self) -> int:
        """Where the weights begin in the extent."""
        return sum(padded(s.span(self.elements)) for s in self.streams)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where one whole tensor is: a buffer, a frozen parameter, a tensor of the caller's own."""

    kind: str
    """The caller's word: "buffer", "frozen", "extra" ..."""
    name: str
    dtype: str
    """As torch calls it, without the "torch."."""
    shape: tuple[int, ...]
    extent: Extent
    """Where its bytes are: an extent of 0 bytes if it has no elements."""
    checksum: int


@dataclass(frozen=True)
class Content:
    """The content of one generation."""

    step: int
    layout: dict[str, Any]
    """JSON, the caller's, but for ``layout["chunks"]``: a list of ChunkShape as dicts, by chunk
    number. Stored once however many generations share it."""
    hyper: Any
    """JSON, the caller's."""
    extra: Any
    """JSON, the caller's."""
    chunks: Sequence[ChunkRecord]
    tensors: Sequence[TensorRecord] = field(default=())

    def extents(self) -> list[Extent]:
        """Return every extent that it refers to; those of no bytes are left out."""
        records: Sequence[ChunkRecord | TensorRecord] = [*self.chunks, *self.tensors]
        return [record.extent for record in records if record.extent.nbytes]

    def as_generation(self, number: int = 0, created: float = 0.0) -> "Generation":
        """Return it as a generation of this number, without a name."""
        records = tuple(self.chunks), tuple(self.tensors)
        content = self.step, self.layout, self.hyper, self.extra
        return Generation(*content, *records, number, created)


@dataclass(frozen=True)
class Generation(Content):
    """One committed version of a store."""

    number: int = 0
    """Counts commits, never used twice."""
    created: float = 0.0
    """Seconds since 1970."""
    names: tuple[str, ...] = ()
    """The snapshots that pin it."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A generation without its records."""

    number: int
    step: int
    created: float
    names: tuple[str, ...]
    chunk_count: int
    bytes: int
    """The bytes of all its extents."""


def chunk_shapes(layout: Mapping[str, Any]) -> tuple[ChunkShape, ...]:
    """Read ``layout["chunks"]``; raise StoreFormatError if it is malformed."""
    try:
        return tuple(_shape(entry) for entry in layout["chunks"])
    except (LookupError, TypeError, ValueError) as error:
        message = (
            f"The layout's chunks cannot be read: {error!r}. Something else wrote them, or"
            " another version: open the store with the version that made it."
        )
        raise StoreFormatError(message) from error


def _shape(entry: Mapping[str, Any]) -> ChunkShape:
    shape = ChunkShape(
        elements=_whole(entry["elements"], 0),
        block=_whole(entry["block"], 1),
        streams=tuple(_stream(stream) for stream in entry["streams"]),
        weight=_stream(entry["weight"]),
    )
    groups = [stream.per for stream in (*shape.streams, shape.weight)]
    if any(shape.block % per for per in groups):
        message = f"blocks of {shape.block} elements cut groups of {groups}"
        raise ValueError(message)
    return shape


def _stream(entry: Mapping[str, Any]) -> StreamShape:
    return StreamShape(bytes=_whole(entry["bytes"], 0), per=_whole(entry["per"], 1))


def _whole(value: object, least: int) -> int:
    # isinstance() would let a bool pass, which JSON may have in place of a number.
    if type(value) is not int or not least <= value <= MOST_ELEMENTS:
        message = f"{repr(value)[:40]} is no number of elements or bytes"
        raise ValueError(message)
    return value
