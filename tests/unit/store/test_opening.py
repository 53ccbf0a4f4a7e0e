"""Opening: in an order that can be cut short anywhere, and nothing is held after a failure."""

import errno as codes
import os
from pathlib import Path

import pytest

from powerloss.events import Created, DirectorySynced, FileSynced, ManifestCommitted, Written
from powerloss.recorder import RecordingDisk
from process_counts import open_descriptors
from tensorstow.base.errors import DirectoryError, LockedError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File
from tensorstow.store.durability import SystemDisk
from tensorstow.store.opening import open_parts
from tensorstow.store.store import Store


def test_the_manifest_tells_of_files_that_are_durable(tmp_path: Path) -> None:
    disk = RecordingDisk()
    Store.open([tmp_path], open_engine(), disk=disk).close()
    assert [type(event) for event in disk.events] == [
        Created,
        Created,
        FileSynced,
        DirectorySynced,
        ManifestCommitted,
        Written,  # what the data file knows of it
        FileSynced,
        Created,  # the copy
        DirectorySynced,
        ManifestCommitted,
    ]
    again = RecordingDisk()
    Store.open([tmp_path], open_engine(), disk=again).close()
    assert again.events == []


class BrokenDisk(SystemDisk):
    def sync_file(self, file: File) -> None:
        raise OSError(codes.EIO, os.strerror(codes.EIO), str(file.path))


@pytest.mark.usefixtures("garbage_apart")
def test_a_failure_lets_go_of_everything(tmp_path: Path) -> None:
    before = open_descriptors()
    engine = open_engine()
    with pytest.raises(DirectoryError, match=r"states-0\.bin.*dmesg"):
        open_parts([tmp_path], engine, BrokenDisk())
    del engine
    assert open_descriptors() == before
    Store.open([tmp_path], open_engine()).close()


def test_every_directory_is_locked(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    one.mkdir()
    two.mkdir()
    with Store.open([one, two], open_engine()):
        for directory in (one, two):
            with pytest.raises(LockedError, match=str(directory)):
                Store.open([directory], open_engine())
