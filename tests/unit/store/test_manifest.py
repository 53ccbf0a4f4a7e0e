"""The manifest: journals, marks of other programs and versions, damage, forks."""

import logging
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from powerloss.contents import make_content, release_all
from tensorstow.base.directories import inspect_directory
from tensorstow.base.errors import CommitError, DamageError, StoreError, StoreFormatError
from tensorstow.io.engine import open_engine
from tensorstow.store import manifest as manifest_module
from tensorstow.store import opening
from tensorstow.store.durability import SystemDisk
from tensorstow.store.manifest import Journal, Manifest, choose_journal
from tensorstow.store.records import Content
from tensorstow.store.store import Store


def fill(directory: Path, steps: int = 1) -> None:
    with Store.open([directory], open_engine()) as store:
        for step in range(1, steps + 1):
            content = make_content(store, step)
            store.commit(content)
            release_all(store, content)


def change(directory: Path, statement: str) -> None:
    connection = sqlite3.connect(directory / "manifest.sqlite")
    connection.execute(statement)
    connection.commit()
    connection.close()


def refuse(directory: Path, told: str, kind: type[StoreError] = StoreFormatError) -> None:
    before = (directory / "manifest.sqlite").read_bytes()
    with pytest.raises(kind, match=told):
        Store.open([directory], open_engine())
    assert (directory / "manifest.sqlite").read_bytes() == before


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "manifest-copy.sqlite").unlink()
    change(tmp_path, "UPDATE meta SET value = '9.9' WHERE key = 'writer'")
    change(tmp_path, "PRAGMA user_version = 3")
    refuse(tmp_path, r"store format 3 by tensorstow 9\.9; this version reads 2")


def test_an_older_format_is_refused_with_the_way_on(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "manifest-copy.sqlite").unlink()
    change(tmp_path, "PRAGMA user_version = 1")
    refuse(tmp_path, "in store format 1 by an older tensorstow; this version reads 2")


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    change(tmp_path, "CREATE TABLE tabs (url TEXT)")
    refuse(tmp_path, "another program's database")
    assert {p.name for p in tmp_path.iterdir()} == {"lock", "manifest.sqlite"}


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "manifest.sqlite").write_text("my notes " * 1000)
    refuse(tmp_path, "file is not a database")


def test_a_damaged_manifest_is_left_alone(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "manifest-copy.sqlite").unlink()
    with (tmp_path / "manifest.sqlite").open("r+b") as file:
        file.seek(4096 + 8)
        file.write(b"\xff" * 64)
    refuse(tmp_path, "no generation in it is whole", DamageError)


def test_a_store_that_was_being_made_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "manifest.sqlite").touch()
    (tmp_path / "states-0.bin").touch()
    fill(tmp_path)
    with Store.open([tmp_path], open_engine()) as store:
        assert [s.step for s in store.generations()] == [1]


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CommitError, match="unable to open"):
        Manifest(tmp_path / "no" / "manifest.sqlite", SystemDisk(), Journal.WRITE_AHEAD)


@pytest.mark.parametrize("filesystem", ["nfs4", "fuse.sshfs", "cifs", "9p"])
def test_network_filesystems_get_another_journal_and_one_warning(
    filesystem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = inspect_directory(tmp_path)
    facts = replace(facts, mount=facts.mount._replace(filesystem=filesystem))
    monkeypatch.setattr(opening, "check_directory", lambda _path: facts)
    with caplog.at_level(logging.WARNING, "tensorstow"):
        fill(tmp_path, steps=3)
        with Store.open([tmp_path], open_engine()) as store:
            connection = store._manifest._database.connection
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
            assert connection.execute("PRAGMA synchronous").fetchone() == (3,)
            assert [s.step for s in store.generations()] == [3]
    assert caplog.text.count("network filesystem") == 1


def test_a_local_disk_gets_a_log_that_is_synced(tmp_path: Path) -> None:
    assert choose_journal(inspect_directory(tmp_path)) is Journal.WRITE_AHEAD
    with Store.open([tmp_path], open_engine()) as store:
        connection = store._manifest._database.connection
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_the_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "_LONG_LOG_BYTES", 200_000)
    with Store.open([tmp_path], open_engine()) as store:
        for step in range(60):
            store.commit(Content(step, {"chunks": []}, "x" * 20_000, None, []))
        log = tmp_path / "manifest.sqlite-wal"
        assert log.stat().st_size < 400_000
        for k in range(30):  # pins never have to copy it
            store.add_snapshot(f"pin-{k}")
        assert [s.step for s in store.generations()] == [59]
    fill(tmp_path)


def test_layouts_are_stored_once(tmp_path: Path) -> None:
    with Store.open([tmp_path], open_engine()) as store:
        count = "SELECT count(*) FROM layouts"
        for step in range(5):
            layout = {"chunks": [], "version": step // 3}
            store.commit(Content(step, layout, None, None, []))
            store.add_snapshot(f"step-{step}")
        assert store._manifest._database.connection.execute(count).fetchone() == (2,)
        for step in range(3):
            store.drop_snapshot(f"step-{step}")
        assert store._manifest._database.connection.execute(count).fetchone() == (1,)
        found = store.generation()
        assert found is not None
        assert found.layout == {"chunks": [], "version": 1}


def test_a_commit_of_many_chunks_is_quick_and_a_pin_writes_little(tmp_path: Path) -> None:
    with Store.open([tmp_path], open_engine()) as store:
        content = make_content(store, 1, chunks=1)
        (chunk,) = content.chunks
        layout = {"chunks": content.layout["chunks"] * 4000}
        chunks = [
            replace(chunk, chunk=k, extent=store.allocate(4096), checksums=bytes(128))
            for k in range(4000)
        ]
        store.commit(Content(1, layout, None, None, chunks))
        log = tmp_path / "manifest.sqlite-wal"
        connection = store._manifest._database.connection
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store.add_snapshot("here")
        assert log.stat().st_size < 64 << 10
        assert store.generations()[0].chunk_count == 4000
