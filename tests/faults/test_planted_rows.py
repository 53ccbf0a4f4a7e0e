"""A run's directory from somebody else: its database cannot delete files, nor keep anybody busy."""

import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from attacks.rows import COUNTED, redigest
from powerloss.contents import make_content
from tensorstow.base.errors import StowError
from tensorstow.cli.main import main
from tensorstow.io.engine import open_engine
from tensorstow.store.manifest_copy import COPY_NAME
from tensorstow.store.recovery import _copy_data, hold_recovery
from tensorstow.store.schema import MANIFEST_NAME
from tensorstow.store.store import Store

MAGIC = bytes.fromhex("d9d505f920a163d7")
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT"
GENERATIONS = (
    " x AS generation, 1 AS step, 1.0 AS created, 1 AS layout, '' AS hyper, '' AS extra,"
    " 1 AS chunks, 1 AS bytes, x'' AS digest FROM c"
)
VIEWS = {
    "generations": f"CREATE VIEW generations AS {ENDLESS} {GENERATIONS}",
    "none": f"CREATE VIEW generations AS {ENDLESS} {GENERATIONS} WHERE x < 0",
    "meta": f"CREATE VIEW meta AS {ENDLESS} 'z' AS key, x AS value FROM c",
}


def opened(run: Path) -> None:
    Store.open([run], open_engine("threads")).close()


def commanded(name: str) -> Callable[[Path], object]:
    return lambda run: main([name, str(run)])


ATTEMPTS = {
    "open": opened,
    **{name: commanded(name) for name in ("inspect", "scrub", "clean", "recover")},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    with Store.open([made], open_engine("threads")) as store:
        store.commit(make_content(store, 1))
    return made


def journal(database: Path, victim: Path) -> bytes:
    """Return a rollback journal of no pages whose super-journal is ``victim``."""
    size = struct.unpack(">H", database.read_bytes()[16:18])[0]
    page = 65536 if size == 1 else size
    pages = database.stat().st_size // page
    head = (MAGIC + struct.pack(">IIIII", 0, 0, pages, 512, page)).ljust(512, b"\0")
    name = str(victim).encode()
    total = sum(byte if byte < 128 else byte - 256 for byte in name) & 0xFFFFFFFF
    at = struct.pack(">I", 0x40000000 // page + 1)
    return head + at + name + struct.pack(">II", len(name), total) + MAGIC


@pytest.mark.parametrize("name", [MANIFEST_NAME, COPY_NAME])
@pytest.mark.parametrize("what", ATTEMPTS)
def test_a_journal_deletes_no_file_of_the_user(
    run: Path, tmp_path: Path, what: str, name: str
) -> None:
    victim = tmp_path / "thesis.txt"
    victim.write_text("years of work")
    (run / f"{name}-journal").write_bytes(journal(run / name, victim))
    try:
        ATTEMPTS[what](run)
    except StowError as error:
        assert f"{name}-journal was found" in str(error)  # noqa: PT017  # others read no journal
    assert victim.read_text() == "years of work"


def test_sqlite_itself_would_delete_it(run: Path, tmp_path: Path) -> None:
    """Else the test above would say nothing."""
    victim = tmp_path / "thesis.txt"
    victim.write_text("years of work")
    database = run / MANIFEST_NAME
    (run / f"{MANIFEST_NAME}-journal").write_bytes(journal(database, victim))
    connection = sqlite3.connect(database)
    connection.execute("SELECT * FROM meta").fetchall()
    connection.close()
    assert not victim.exists()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("what", ATTEMPTS)
def test_a_view_without_end_is_not_read(run: Path, what: str, view: str) -> None:
    (run / COPY_NAME).unlink()
    connection = sqlite3.connect(run / MANIFEST_NAME, isolation_level=None)
    connection.execute("DROP TABLE meta" if view == "meta" else "DROP TABLE generations")
    connection.execute(VIEWS[view])
    connection.close()
    try:
        ended = ATTEMPTS[what](run)
    except StowError:
        return
    assert ended != 0


def test_a_sparse_file_is_copied_without_its_holes(tmp_path: Path) -> None:
    size = 1 << 30
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.write(b"head")
        sparse.seek(size // 2)
        sparse.write(b"middle")
        sparse.truncate(size)
    with (tmp_path / "sparse").open("rb") as old, (tmp_path / "copy").open("xb") as new:
        _copy_data(old, new)
    facts = (tmp_path / "copy").stat()
    assert facts.st_size == size
    assert facts.st_blocks * 512 < 1 << 20
    with (tmp_path / "copy").open("rb") as copy:
        assert copy.read(4) == b"head"
        copy.seek(size // 2)
        assert copy.read(6) == b"middle"


def test_what_is_beyond_a_file_is_damaged_and_not_read(run: Path) -> None:
    connection = sqlite3.connect(run / MANIFEST_NAME, isolation_level=None)
    (last,) = connection.execute("SELECT max(offset) FROM tensors").fetchone()
    changed = connection.execute(
        "UPDATE tensors SET dtype = 'uint8', shape = ?, nbytes = ? WHERE offset = ?",
        (f"[{1 << 44}]", 1 << 44, last),
    )
    assert changed.rowcount == 1
    connection.execute(COUNTED)
    redigest(connection)
    connection.close()
    (run / COPY_NAME).unlink()
    assert main(["run", "scrub", str(run)]) == 1
    with hold_recovery([run]) as recovery:
        assert [generation.step for generation in recovery.damaged] == [1]
        assert recovery.whole == ()
