"""A store's files with one bit, one value or one row that is another: found out, or harmless."""

import random
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from powerloss.contents import commit, damages_in, make_content, release_all
from powerloss.recorder import nothing_synced
from tensorstow.base.errors import StowError
from tensorstow.io.engine import open_engine
from tensorstow.store.store import Store

NAMES = ("a", "b")
MANIFEST = "a/manifest.sqlite"
LOG = "a/manifest.sqlite-wal"
COPIES = ("a/manifest-copy.sqlite", "a/manifest-copy.sqlite-wal")
DATA = ("a/states-0.bin", "b/states-1.bin")
HEADER_BYTES = 3 * 4096
ENGINE = open_engine("threads")
VALUES = (None, -1, 0, 1, 1 << 62, 1.5, "", "x", "1", b"", b"\0" * 40, "[" * 200_000, '{"a":NaN}')


def directories(root: Path) -> list[Path]:
    return [root / name for name in NAMES]


def make_run(root: Path, live: Path) -> None:
    """Make a run of six commits in ``root``; ``live`` is as a kill would have left it."""
    for directory in directories(root):
        directory.mkdir(parents=True)
    with Store.open(directories(root), ENGINE) as store:
        for step in range(1, 7):
            commit(store, step)
            if step in {2, 4}:
                store.add_snapshot(f"step-{step}")
        content = make_content(store, 7, extra={"loss": 0.25, "words": ["x"] * 50})
        store.commit(content)
        release_all(store, content)
        copy(root, live)


def copy(root: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root, target)


def drop_copy(root: Path) -> None:
    """Leave one manifest alone, without the copy that would be put in its place."""
    for path in (root / "a").glob("manifest-copy.sqlite*"):
        path.unlink()


def change_rows(path: Path, statement: str) -> None:
    """Run a statement of SQL in a manifest."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement)


def damage_heads(root: Path) -> None:
    """Make the records of the newest transaction in all data files unreadable."""
    for data in DATA:
        with (root / data).open("r+b") as file:
            file.seek(4096)
            file.write(bytes(8192))


def facts(root: Path) -> str:
    """Return all that a store says; raise what it says is wrong. The run goes on behind it."""
    with nothing_synced(), Store.open(directories(root), ENGINE) as store:
        kept = [store.load(summary) for summary in store.generations()]
        newest = store.generation()
        damages = damages_in(store)
        commit(store, 99)
    if damages:
        message = f"scrub: {damages[0]}"
        raise StowError(message)
    return repr([*kept, newest])


def judge(root: Path, wanted: str) -> str:
    """Return "the same", the name of the error, or what is wrong about a store in ``root``."""
    try:
        found = facts(root)
    except StowError as error:
        return type(error).__name__
    except Exception as error:  # noqa: BLE001  # that is the finding
        return f"WRONG: a bare {error!r}"
    return "the same" if found == wanted else "WRONG: other results, and no word"


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def some_bits(path: Path, count: int, seed: int) -> list[int]:
    """Return ``count`` bits of a file at random."""
    size = path.stat().st_size
    if path.name.startswith("states-"):
        size = HEADER_BYTES  # what lies behind it is under the checksums of its chunks
    dice = random.Random(seed)  # noqa: S311
    return [dice.randrange(8 * size) for _ in range(count)]


def spread_bits(path: Path, count: int) -> list[int]:
    """Return a bit of every k-th byte of a database or a log, and of more in its header."""
    size, head = path.stat().st_size, 100
    offsets = [*range(0, head, 1 + 2 * head // count), *range(head, size, 1 + 2 * size // count)]
    return [8 * offset + index % 8 for index, offset in enumerate(offsets)]


def flips(golden: Path, target: Path, name: str, bits: Iterable[int]) -> Iterator[str]:
    """Flip ``bits`` of a file, one at a time; yield what came of each."""
    copy(golden, target / "golden")
    wanted = facts(target / "golden")
    for bit in bits:
        copy(golden, target / "flipped")
        flip(target / "flipped" / name, bit)
        yield f"{judge(target / 'flipped', wanted)} (bit {bit} of {name})"


def changes(golden: Path) -> list[tuple[str, tuple[object, ...]]]:
    """Return statements that change one value, or delete rows, for every column and type."""
    connection = sqlite3.connect(f"file:{golden / MANIFEST}?mode=ro", uri=True)
    tables = [n for (n,) in connection.execute("SELECT name FROM sqlite_master WHERE sql <> ''")]
    found: list[tuple[str, tuple[object, ...]]] = []
    for table in tables:
        found.append((f"DELETE FROM {table}", ()))  # noqa: S608
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        first = connection.execute(f"SELECT * FROM {table} LIMIT 1").fetchone()  # noqa: S608
        match = " AND ".join(f"{name} IS ?" for name in names)
        found += [
            (f"UPDATE {table} SET {name} = ? WHERE {match}", (value, *first))  # noqa: S608
            for name, before in zip(names, first, strict=True)
            for value in VALUES
            if value != before and str(value) != str(before)  # which SQLite takes for the same
        ]
    connection.close()
    return found


def change(golden: Path, target: Path, what: tuple[str, tuple[object, ...]], wanted: str) -> str:
    """Make one change; return what came of it, "refused" where SQLite does not let it happen."""
    copy(golden, target)
    drop_copy(target)
    connection = sqlite3.connect(target / MANIFEST, isolation_level=None)
    try:
        before = connection.total_changes
        connection.execute(*what)
        if connection.total_changes == before:
            return "refused"
    except sqlite3.IntegrityError:
        return "refused"
    finally:
        connection.close()
    return judge(target, wanted)
