"""Rebuilds a damaged manifest from its intact rows, when asked to.

The old one is kept beside it. Of the data files only the heads are written; what the new manifest
does not refer to is free from then on.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tensorstow.base.directories import inspect_directory
from tensorstow.base.errors import StoreFormatError, StowError, named
from tensorstow.store.datafiles import check_files, data_path, read_label
from tensorstow.store.durability import SystemDisk
from tensorstow.store.heads import Head, find_head, put_head
from tensorstow.store.lock import DirectoryLock
from tensorstow.store.manifest import MANIFEST_NAME, Journal, Manifest
from tensorstow.store.pieces import chunk_pieces, tensor_pieces
from tensorstow.store.records import Generation, chunk_shapes
from tensorstow.store.rows import read_directories
from tensorstow.store.schema import check_marks
from tensorstow.store.verify import MALFORMED, check_all, check_heads, whole_generations

DAMAGED_NAME = f"{MANIFEST_NAME}.damaged"
_NEW_NAME = f"{MANIFEST_NAME}.new"
_BESIDE = ("-wal", "-journal")


@dataclass(frozen=True, slots=True)
class Recovery:
    """The intact part of a store's manifest."""

    run: str
    directories: tuple[Path, ...]
    whole: tuple[Generation, ...]
    """Oldest first; their data too, where anything is damaged."""
    overwritten: tuple[Generation, ...]
    """Whose records are whole and whose data are not: dropped since, by a commit that is lost."""
    newest: Head
    """The newest transaction that a data file records."""
    damage: str | None
    """What is wrong; None where nothing is."""

    @property
    def has_newest(self) -> bool:
        """Return whether the newest generation that was ever reported is among the whole ones."""
        return not self.newest.generation or any(
            generation.number >= self.newest.generation for generation in self.whole
        )


@contextmanager
def hold_recovery(directories: Sequence[Path]) -> Iterator[Recovery]:
    """Lock the store in ``directories`` and return what is intact in its manifest.

    The first directory is enough if none was moved or copied. Raises StoreFormatError where there
    is no store or one of another format, LockedError where its run is live.
    """
    first, *others = (inspect_directory(directory).path for directory in directories)
    with named("A recovery of the store in", first), ExitStack() as resources:
        label = read_label(data_path(first, 0)) if data_path(first, 0).is_file() else None
        if label is None:
            message = (
                f"A store was requested in {first}: there is no states-0.bin in it that says which"
                " run it is of. Name the store's first directory."
            )
            raise StoreFormatError(message)
        resources.callback(DirectoryLock(first).release)
        scratch = Path(resources.enter_context(tempfile.TemporaryDirectory(dir=first)))
        copy = _copy_manifest(first, scratch)
        with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            whole, _ = whole_generations(connection, label.run)
            paths = [first, *(others or _others(connection, first, label.count))]
            check_files(label.run, paths)
            for path in paths[1:]:
                resources.callback(DirectoryLock(path).release)
            data_files = [data_path(path, k) for k, path in enumerate(paths)]
            damage = _find_damage(connection, first / MANIFEST_NAME, data_files)
        heads = [head for file in data_files if (head := find_head(file, label.run)) is not None]
        newest = max(heads, key=lambda head: head.transaction, default=Head(label.run))
        good = [g for g in whole if damage is None or _has_its_data(g, data_files)]
        bad = [g for g in whole if g not in good]
        yield Recovery(label.run, tuple(paths), tuple(good), tuple(bad), newest, damage)


def recover(found: Recovery) -> None:
    """Write a manifest of the intact generations; call it while ``found`` is held."""
    first, disk = found.directories[0], SystemDisk()
    with named("A recovery of the store in", first):
        new = first / _NEW_NAME
        for path in (new, new.with_name(f"{_NEW_NAME}-journal")):
            path.unlink(missing_ok=True)
        numbers = [found.newest.generation, *(generation.number for generation in found.whole)]
        with closing(Manifest(new, disk, Journal.ROLLBACK)) as manifest:
            manifest.begin_run(found.run, found.directories)
            # Far from any used number, so that older copies can be told apart.
            manifest.put_back(found.whole, found.newest.transaction + 1000, max(numbers))
            head = manifest.head()
        disk.sync_directory(first)
        # The old one goes before its log, and that before the new one comes: SQLite would put the
        # log of one into the other.
        for suffix in ("", *_BESIDE):
            old = first / f"{MANIFEST_NAME}{suffix}"
            if old.exists():
                old.replace(first / f"{DAMAGED_NAME}{suffix}")
        (first / f"{MANIFEST_NAME}-shm").unlink(missing_ok=True)
        new.replace(first / MANIFEST_NAME)
        disk.sync_directory(first)
        for index, path in enumerate(found.directories):
            put_head(data_path(path, index), head)


def _copy_manifest(first: Path, scratch: Path) -> Path:
    """Copy the manifest, or an earlier recovery's backup, with its log, as SQLite writes to it."""
    copy = scratch / MANIFEST_NAME
    for suffix in ("", *_BESIDE):
        names = (f"{MANIFEST_NAME}{suffix}", f"{DAMAGED_NAME}{suffix}")
        # One that was put aside is of use only while there is no other.
        candidates = names if not (first / MANIFEST_NAME).exists() else names[:1]
        source = next((first / name for name in candidates if (first / name).exists()), None)
        if source is not None:
            shutil.copyfile(source, copy.with_name(f"{MANIFEST_NAME}{suffix}"))
    return copy


def _others(connection: sqlite3.Connection, first: Path, count: int) -> Sequence[Path]:
    if count == 1:
        return []
    try:
        noted = read_directories(connection)
    except MALFORMED:
        noted = []
    # The manifest of a copied or moved run may refer to the original's files.
    if len(noted) != count or noted[0] != first:
        message = (
            f"A recovery was requested of the store in {first}, which has {count} directories, and"
            " its manifest does not say where they are now. Name all of them, in their order."
        )
        raise StoreFormatError(message)
    return noted[1:]


def _has_its_data(generation: Generation, data_files: Sequence[Path]) -> bool:
    """Return whether the bytes that a generation refers to are intact."""
    shapes = dict(enumerate(chunk_shapes(generation.layout)))
    pieces = [p for r in generation.chunks for p in chunk_pieces(r, shapes.get(r.chunk))]
    pieces += [p for r in generation.tensors for p in tensor_pieces(r)]
    with ExitStack() as opened:
        files = [opened.enter_context(path.open("rb")) for path in data_files]
        for piece in pieces:
            data = torch.empty(piece.nbytes, dtype=torch.uint8, device="cpu")
            files[piece.file].seek(piece.offset)
            read = files[piece.file].readinto(data.numpy().data)
            if read < piece.nbytes or piece.check(data.data_ptr()):
                return False
    return True


def _find_damage(
    connection: sqlite3.Connection, path: Path, data_files: Sequence[Path]
) -> str | None:
    try:
        if not check_marks(connection, path):
            return f"{path} is empty or gone"
        check_heads(connection, path, data_files, check_all(connection, path))
    except StoreFormatError:
        raise  # intact but unreadable for us: what it refers to must not be overwritten
    except (StowError, *MALFORMED) as error:
        return str(error)
    return None
