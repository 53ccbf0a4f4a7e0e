"""The rates of a directory, through the engine: plausible, of written bytes alone, nothing left."""

import errno
from pathlib import Path

import pytest

import tensorstow._native as _native
from process_counts import open_descriptors
from tensorstow.base.errors import DirectoryError, TransferError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
from tensorstow.measure import disk_rates
from tensorstow.measure.disk_rates import measure_directory


@pytest.mark.usefixtures("garbage_apart")
def test_rates_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    descriptors = open_descriptors()
    found = measure_directory(tmp_path, seconds=0.4)
    assert min(found.read, found.write, found.mixed) > 1e6
    assert max(found.read, found.write, found.mixed) < 1e12
    assert (found.block_bytes, found.depth) in disk_rates._SETTINGS
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == descriptors


def test_a_slow_disk_is_measured_as_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(**given: int) -> _native.Engine:
        engine = open_engine(**given)
        for operation in ("read", "write"):
            engine.inject_fault(operation, times=1 << 30, delay_us=20_000)
        return engine

    monkeypatch.setattr(disk_rates, "open_engine", slow)
    monkeypatch.setattr(disk_rates, "_SETTINGS", (disk_rates._DEFAULT,))
    monkeypatch.setattr(disk_rates, "_UNDER_WAY", 2)  # each rate waits for what is under way
    found = measure_directory(tmp_path, seconds=0.1)
    assert found.mixed < 0.3e9  # a transfer of 4 MiB in 20 ms
    assert not found.is_worth_offloading


def test_only_what_was_written_is_read(tmp_path: Path) -> None:
    room = 8
    engine = open_engine(depth=2)
    with scratch_file(engine, tmp_path, room * disk_rates._TRANSFER) as file:
        scratch = disk_rates._Scratch(file, room)
        scratch._written = 3
        reads = scratch._places("read")
        assert [next(reads) for _ in range(4)] == [
            ("read", 0),
            ("read", 1),
            ("read", 2),
            ("read", 0),
        ]
        scratch._written = 4
        both = scratch._places("mixed")
        assert [next(both) for _ in range(6)] == [
            ("read", 0),
            ("write", 2),
            ("read", 1),
            ("write", 3),
            ("read", 0),
            ("write", 2),
        ]


def test_directories_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DirectoryError, match="RAM"):
        measure_directory(Path("/dev/shm"), seconds=0.1)
    with pytest.raises(DirectoryError, match="missing"):
        measure_directory(tmp_path / "missing", seconds=0.1)
    monkeypatch.setattr(disk_rates, "_PART_OF_FREE", 1 << 40)
    with pytest.raises(DirectoryError, match="takes a quarter of that, and needs"):
        measure_directory(tmp_path, seconds=0.1)


def test_a_failing_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(**given: int) -> _native.Engine:
        engine = open_engine(**given)
        engine.inject_fault("write", after=2, error=errno.EIO)
        return engine

    monkeypatch.setattr(disk_rates, "open_engine", failing)
    with pytest.raises(TransferError, match="Input/output"):
        measure_directory(tmp_path, seconds=0.4)
    assert list(tmp_path.iterdir()) == []
