"""A disk that writes down what it is asked for."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from powerloss.events import (
    Created,
    DirectorySynced,
    Event,
    FileSynced,
    ManifestCommitted,
    Written,
)
from tensorstow import _native
from tensorstow.io.files import File, IoFuture
from tensorstow.store import manifest, manifest_copy
from tensorstow.store.durability import SystemDisk
from tensorstow.store.schema import set_journal


@contextmanager
def nothing_synced() -> Iterator[None]:
    """Let stores that are opened inside sync nothing, for speed: nobody loses power here."""

    def set_unsynced(connection: sqlite3.Connection, journal: tuple[str, str]) -> None:
        set_journal(connection, (journal[0], "OFF"))

    with pytest.MonkeyPatch.context() as patch:
        for module in (manifest, manifest_copy):
            patch.setattr(module, "set_journal", set_unsynced)
        patch.setattr(SystemDisk, "sync_file", lambda *_: None)
        patch.setattr(SystemDisk, "sync_directory", lambda *_: None)
        yield


class RecordingFile(File):
    events: list[Event]

    def write(self, tensor: torch.Tensor, offset: int) -> IoFuture:
        future = super().write(tensor, offset)
        future.wait()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        self.events.append(Written(self.path, offset, data))
        return future


class RecordingDisk(SystemDisk):
    """The real disk and a log of it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def create(self, path: Path, contents: bytes) -> None:
        super().create(path, contents)
        self.events.append(Created(path, contents))

    def open(self, engine: _native.Engine, path: Path) -> File:
        file = super().open(engine, path)
        file.__class__ = RecordingFile
        assert isinstance(file, RecordingFile)
        file.events = self.events
        return file

    def sync_file(self, file: File) -> None:
        super().sync_file(file)
        self.events.append(FileSynced(file.path))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.events.append(DirectorySynced(path))

    def end_transaction(self, connection: sqlite3.Connection) -> None:
        super().end_transaction(connection)
        (_, _, path), *_ = connection.execute("PRAGMA database_list")
        self.events.append(ManifestCommitted(Path(path), connection.serialize()))


class UnmadeDisk(RecordingDisk):
    """Forgets to sync the data files that it has just made."""

    has_begun = False

    def sync_file(self, file: File) -> None:
        if self.has_begun:
            super().sync_file(file)

    def end_transaction(self, connection: sqlite3.Connection) -> None:
        super().end_transaction(connection)
        self.has_begun = True


class ForgetfulDisk(UnmadeDisk):
    """Forgets to sync the data files of a commit."""

    def sync_file(self, file: File) -> None:
        if not self.has_begun:
            RecordingDisk.sync_file(self, file)


class HastyDisk(UnmadeDisk):
    """Ends a commit's transaction before its data files are synced."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[File] = []

    def sync_file(self, file: File) -> None:
        if self.has_begun:
            self._late.append(file)
        else:
            RecordingDisk.sync_file(self, file)

    def end_transaction(self, connection: sqlite3.Connection) -> None:
        super().end_transaction(connection)
        for file in self._late:
            super().sync_file(file)
        self._late.clear()


class NamelessDisk(RecordingDisk):
    """Forgets to sync directories."""

    def sync_directory(self, path: Path) -> None:
        pass
