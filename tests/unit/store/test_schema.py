"""What SQLite's errors mean to a store."""

import sqlite3
from pathlib import Path

import pytest

from tensorstow.base.errors import (
    CommitError,
    DamageError,
    OptionError,
    StoreFormatError,
    SyncError,
)
from tensorstow.store.schema import FORMAT, read_failure, write_failure

PATH = Path("/nvme/run/manifest.sqlite")


def made(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("it failed")
    error.sqlite_errorcode = code
    error.sqlite_errorname = "SQLITE_SOMETHING"
    return error


def test_the_format_is_frozen() -> None:
    assert FORMAT == 2


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        (sqlite3.SQLITE_FULL, CommitError, "Free some space"),
        (sqlite3.SQLITE_READONLY, CommitError, "read-only"),
        (sqlite3.SQLITE_BUSY, CommitError, "Something else has the file open"),
        (sqlite3.SQLITE_ERROR, CommitError, "committed before is whole"),
        (sqlite3.SQLITE_IOERR_WRITE, SyncError, "no more are begun"),
        (sqlite3.SQLITE_IOERR_FSYNC, SyncError, "dmesg"),
        (sqlite3.SQLITE_CORRUPT, DamageError, "tensorstow run recover /nvme/run"),
        (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, OptionError, "own number"),
    ],
)
def test_while_writing(code: int, kind: type[Exception], told: str) -> None:
    error = write_failure(PATH, made(code))
    assert type(error) is kind
    assert told in str(error)


def test_tables_that_are_not_there_are_damage(tmp_path: Path) -> None:
    error = made(sqlite3.SQLITE_ERROR)
    assert isinstance(read_failure(tmp_path / "manifest.sqlite", error), StoreFormatError)
    (tmp_path / "states-0.bin").touch()
    assert isinstance(read_failure(tmp_path / "manifest.sqlite", error), DamageError)


def test_while_reading() -> None:
    assert isinstance(read_failure(PATH, made(sqlite3.SQLITE_NOTADB)), StoreFormatError)
    error = read_failure(PATH, made(sqlite3.SQLITE_CANTOPEN))
    assert isinstance(error, CommitError)
    assert "SQLITE_SOMETHING" in str(error)
    assert "Error" in str(read_failure(PATH, sqlite3.ProgrammingError("closed")))
