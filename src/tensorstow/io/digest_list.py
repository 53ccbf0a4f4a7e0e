"""Lists of the files of a checkpoint with their sizes and checksums, which loading verifies.

[Note: Lists of digests] A checkpoint is loaded by one file: the only one, an index, or the one that
is the same on every rank. The list has the name of that file with ``SUFFIX``, and its own checksum.
A checkpoint of another program has none, and is loaded without.
"""

import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

import tensorstow._native as _native
from tensorstow.base.core_share import LocalRanks
from tensorstow.base.directories import path_inside
from tensorstow.base.errors import DamageError, named
from tensorstow.base.new_file import NewFile, new_stream
from tensorstow.base.regular_file import (
    check_regular,
    is_there,
    open_regular,
    read_regular,
    remove_file,
)

logger = logging.getLogger("tensorstow")

SUFFIX = ".digests"
_PIECE_BYTES = 4 << 20
"""A checksum is chained over pieces of this many bytes; part of the format."""
_LONGEST = 1 << 28
"""Bytes of a list."""

_warned_unlisted: set[str] = set()

_Item = TypeVar("_Item")


class Digest(NamedTuple):
    """The size of a file, and its checksum."""

    nbytes: int
    checksum: int


class RunningDigest:
    """The digest of bytes that come one after the other, in any portions."""

    def __init__(self) -> None:
        """Begin without bytes."""
        self._nbytes = self._checksum = 0
        self._piece = np.empty(_PIECE_BYTES, np.uint8)

    def add(self, data: Any, offset: int | None = None) -> None:  # noqa: ANN401  # any buffer
        """Take the next bytes; ``offset`` is where the caller takes them to be."""
        if offset not in {None, self._nbytes}:
            message = f"bytes at {offset} were given, and those at {self._nbytes} are next"
            raise ValueError(message)
        left = np.frombuffer(data, np.uint8)
        while left.size:
            at = self._nbytes % _PIECE_BYTES
            part, left = left[: _PIECE_BYTES - at], left[_PIECE_BYTES - at :]
            self._nbytes += part.size
            if part.size == _PIECE_BYTES:  # a whole piece needs no copy
                self._checksum = _chained(part, self._checksum)
                continue
            self._piece[at : at + part.size] = part
            if at + part.size == _PIECE_BYTES:
                self._checksum = _chained(self._piece, self._checksum)

    def digest(self) -> Digest:
        """Return the digest of all bytes until now."""
        rest = self._piece[: self._nbytes % _PIECE_BYTES]
        return Digest(self._nbytes, _chained(rest, self._checksum) if rest.size else self._checksum)


class _DigestedFile(io.FileIO):
    """A file that is written from its begin to its end."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "wb")
        self.running = RunningDigest()

    def write(self, data: Any, /) -> int:  # noqa: ANN401  # as in io.FileIO
        written = super().write(data)
        self.running.add(memoryview(data).cast("B")[:written])
        return written

    def seekable(self) -> bool:
        return False  # a writer that went back would change bytes that are in the digest


class DigestList:
    """The digests of the files of a checkpoint, which are in the directory of one of them."""

    def __init__(self, main: Path) -> None:
        """Begin without files; ``main`` is the one that is named to load the checkpoint."""
        self.main = main
        self.path = main.with_name(main.name + SUFFIX)
        self.digests: dict[str, Digest] = {}
        """Digests by the name relative to the directory."""

    @contextmanager
    def stream(self, file: NewFile) -> Iterator[BinaryIO]:
        """Yield a stream to a new file; seal it after the block, and note its digest."""
        # A copy of the descriptor: the stream closes its own, and ``seal`` syncs by the other.
        raw = _DigestedFile(os.dup(file.fd))
        with named("File", file.path), io.BufferedWriter(raw, 1 << 20) as opened:
            yield opened
        self.note(file.path, raw.running.digest())
        file.seal()

    def note(self, path: Path, digest: Digest) -> None:
        """Note the digest of a file."""
        self.digests[path.relative_to(self.main.parent).as_posix()] = digest

    def write_main(self, write: Callable[[BinaryIO], object]) -> None:
        """Write the main file by ``write``, durably, and the list of all that were noted.

        Both replace older ones. If the process is killed in between, there is no list.
        """
        with NewFile(self.main) as file:
            with self.stream(file) as stream:
                write(stream)
            self.publish(file)

    def publish(self, main: NewFile) -> None:
        """Give the main file its name, and write the list of all that were noted."""
        main.seal()
        self.remove()  # before that: an older list would call the new file damaged
        main.publish()
        self.write()

    def write(self) -> None:
        """Write the list, durably."""
        with new_stream(self.path) as stream:
            stream.write(_encoded(self.digests))

    def remove(self) -> None:
        """Remove an older list, before the first of its files is replaced."""
        remove_file(self.path)


def verify(main: Path, ranks: LocalRanks | None = None) -> None:
    """Raise DamageError unless the files of a checkpoint have what was written to them.

    ``main`` is the file that is named to load it. The first checkpoint of this process without a
    list is logged. ``ranks``: the ranks of this machine, if all of them make this call: each reads
    some files. Raises DirectoryError if a file cannot be read.
    """
    path = DigestList(main).path
    if not is_there(path):
        _warn_unlisted(main)
        return
    for name, wanted in _share_of(sorted(_read(path).items()), ranks):
        file = path_inside(main.parent, name, path)
        _compare(file, wanted, path)


def verify_each(mains: Mapping[Path, Sequence[Path]], ranks: LocalRanks | None = None) -> None:
    """Raise DamageError unless each of some files has its digest; they may be links.

    ``mains`` has, by each file, the files that it may have been listed with. The rest is as of
    ``verify``.
    """
    # Sorted: every rank must cut the same list.
    for file, places in _share_of(sorted(mains.items()), ranks):
        path = _list_of(places)
        wanted = None if path is None else _read(path).get(file.name)
        if path is None or wanted is None:
            _warn_unlisted(file)
        else:
            _compare(file, wanted, path)


def _share_of(items: Sequence[_Item], ranks: LocalRanks | None) -> Sequence[_Item]:
    """Return the items that this rank reads."""
    # A rank whose number is not known reads all.
    local = LocalRanks() if ranks is None or ranks.rank is None else ranks
    return items[local.rank :: local.count]


def _warn_unlisted(main: Path) -> None:
    if main.is_file() and not _warned_unlisted:
        _warned_unlisted.add(str(main))
        logger.warning(
            "%s has no list of digests (%s), as those of other programs: such checkpoints are"
            " loaded without a check for damage",
            *(main, DigestList(main).path.name),
        )


def _list_of(mains: Iterable[Path]) -> Path | None:
    lists = (DigestList(main).path for main in mains)
    return next((path for path in lists if is_there(path)), None)


def listed_digest(file: Path, mains: Iterable[Path]) -> Digest | None:
    """Return the digest that a file was written with, by the first list that exists; None: none.

    ``mains``: files of its directory that it may have been listed with. Raises DamageError if the
    list is damaged.
    """
    path = _list_of(mains)
    return None if path is None else _read(path).get(file.name)


def digest_of(path: Path) -> Digest:
    """Return the digest of a file; raise DirectoryError if it is no regular file, or unreadable."""
    with named("File", path):
        fd = open_regular(path)
        try:
            return digest_of_descriptor(fd)
        finally:
            os.close(fd)


def digest_of_descriptor(fd: int) -> Digest:
    """Return the digest of an open file, which is read once, in pieces."""
    running, piece = RunningDigest(), memoryview(bytearray(_PIECE_BYTES))
    done = 0
    while count := os.preadv(fd, [piece], done):
        running.add(piece[:count])
        done += count
    return running.digest()


def _compare(file: Path, wanted: Digest, path: Path) -> None:
    """Raise DamageError unless a file has the digest that the list at ``path`` has."""
    with named("File", file):
        try:
            nbytes = check_regular(file).st_size
        except FileNotFoundError:
            nbytes = None
    if nbytes != wanted.nbytes:
        state = "is gone" if nbytes is None else f"has {nbytes} bytes"
        message = (
            f"{file} {state}, and {wanted.nbytes} bytes were written: it was cut short, moved or"
            f" replaced. Load another checkpoint. If it is what you want to load, remove {path}."
        )
        raise DamageError(message)
    if digest_of(file) != wanted:
        message = (
            f"{file} has another checksum than what was written: it was damaged, or changed by"
            " another program. Load another checkpoint. If you changed it on purpose, remove"
            f" {path}."
        )
        raise DamageError(message)


def _encoded(digests: dict[str, Digest]) -> bytes:
    # One layout, byte for byte: ``_read`` compares the file with it.
    rows = [f"  {json.dumps(name)}: {[*digest]}" for name, digest in sorted(digests.items())]
    files, running = ",\n".join(rows), RunningDigest()
    running.add(files.encode())
    return f'{{"checksum": {running.digest().checksum}, "files": {{\n{files}\n}}}}\n'.encode()


def _read(path: Path) -> dict[str, Digest]:
    """Return the digests of a list; raise DamageError unless all of its bytes are as written."""
    with named("File", path):
        text = read_regular(path, _LONGEST)
    try:
        digests = {str(k): Digest(*map(int, v)) for k, v in json.loads(text)["files"].items()}
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        digests = {}
    # Encoding again compares the checksum and every other byte, whatever JSON let pass.
    if not digests or _encoded(digests) != text:
        message = (
            f"{path}, which has the digests of a checkpoint's files, is damaged, cut short or of a"
            " newer version. Load another checkpoint, or remove it to load this one without a check"
            " for damage."
        )
        raise DamageError(message)
    return digests


def _chained(piece: npt.NDArray[np.uint8], checksum: int) -> int:
    return _native.checksum(piece.ctypes.data, piece.size, checksum)
