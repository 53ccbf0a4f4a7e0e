"""Digests over the manifest's rows: SQLite does not check its pages.

[Note: Digests] Each generation has a digest over all its rows, computed from the inserted values
and checked against those that are read before they are used. The seal is a digest over all that
belongs to no single generation: the lists of generations, snapshots and files, the schema, the run.
Each transaction rewrites it.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from tensorstow.base.errors import DamageError

SqlRow = Sequence[Any]

_SEALED = (
    "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name",
    "SELECT key, value FROM meta WHERE key <> 'seal' ORDER BY key",
    "SELECT file, directory FROM files ORDER BY file",
    "SELECT layout, hash FROM layouts ORDER BY layout",
    "SELECT generation, digest FROM generations ORDER BY generation",
    "SELECT name, generation, digest FROM snapshots ORDER BY name",
    "SELECT seq FROM sqlite_sequence WHERE name = 'generations'",
)


def digest_of(*tables: Iterable[SqlRow]) -> bytes:
    """Return the digest of rows of numbers, text, bytes and None, table by table."""
    total = hashlib.sha256()
    for rows in tables:
        table = list(rows)
        # Lengths: so that no byte may go from one value to the next.
        plain = [[(len(v),) if type(v) is bytes else v for v in row] for row in table]
        total.update(repr(plain).encode("utf-8", "surrogatepass"))
        total.update(b"".join([v for row in table for v in row if type(v) is bytes]))
    return total.digest()


def seal_of(connection: sqlite3.Connection) -> str:
    """Return the seal of the manifest as it is."""
    return digest_of(*(connection.execute(statement) for statement in _SEALED)).hex()


def check_seal(connection: sqlite3.Connection) -> None:
    """Raise DamageError unless the manifest has the seal that it should have."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'seal'").fetchone()
    if row is None or row[0] != seal_of(connection):
        message = "which generations, snapshots and files there are is not what was written"
        raise DamageError(message)
