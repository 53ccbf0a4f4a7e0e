"""A manifest in which one value is another and every digest is right again.

Each alteration is resumed in a process of its own, for the worst that may come of it is a crash.
"""

import copy
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import children
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import StowError
from tensorstow.store import space
from tensorstow.store.manifest_copy import COPY_NAME
from tensorstow.store.rows import _digest, digest_of, seal_of

MANIFEST = "manifest.sqlite"
HUGE = 1 << 62
CELLS: tuple[object, ...] = (
    *(None, -1, 0, 1, 2, 7, 4096, 1 << 31, HUGE, -HUGE, 0.5, 1e300, float("inf"), "", "x", "1"),
    *("../x", "/etc", "\0", "\x1b[2J", "quint8", b"", b"\0" * 4, b"\xff" * 40, "[" * 100_000),
)
LEAVES: tuple[object, ...] = (
    *(None, True, False, -1, 0, 1, 2, 33, 1 << 31, HUGE, -HUGE, 10**30, 0.5, -1.0, 1e300),
    *(float("nan"), float("inf"), "", "x", "0", "float16", "quint8", "int8", "split", [], {}),
    *([[]], [1, 2], {"__tensor__": 0}, {"__tensor__": 99}, {"__bytes__": 3}),
    *({"__scalar__": ["O", "41" * 8]}, {"__array__": 0}, {"__set__": [[]]}, {"__device__": "x"}),
)
FREE = ("step", "created", "extra", "groups", "steps", "reseed", "writer")
"""What says something by itself: another value of the right kind is another run, not a flaw."""
COUNTED = """
    WITH extents AS (SELECT generation AS g, nbytes FROM chunks
                     UNION ALL SELECT generation, nbytes FROM tensors)
    UPDATE generations SET
        chunks = (SELECT count(*) FROM chunks AS c WHERE c.generation = generations.generation),
        bytes = (SELECT sum(nbytes) FROM extents WHERE g = generations.generation)
"""
Change = Callable[[sqlite3.Connection], None]


class Model(nn.Module):
    """Parameters of two dtypes, one that is cut into chunks, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.linspace(-1, 1, 150).reshape(15, 10))
        self.small = nn.Parameter(torch.linspace(0, 1, 40))
        self.narrow = nn.Parameter(torch.linspace(0, 2, 70).bfloat16())
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))


class Run:
    """The run that is committed, and resumed from an altered manifest."""

    def __init__(self, directory: Path) -> None:
        self.model = Model()
        decayed = [self.model.wide, self.model.narrow]
        plain = [self.model.small, self.model.frozen]
        self.optimizer = AdamW(
            [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
            states="disk",
            dir=directory,
            module=self.model,
            commit_every=None,
            extra=lambda: {"seen": (1, 2), "draws": torch.arange(4), "name": "x"},
            policy=PipelinePolicy(chunk_elements=64, backend="threads", threads=1, depth=2),
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for parameter in self.optimizer.param_groups[0]["params"] + [self.model.small]:
                parameter.grad = torch.cos(parameter.detach().float()).to(parameter.dtype)
            self.optimizer.step()
            self.model.counts += 1

    def facts(self) -> str:
        values = [v.float().tolist() for v in self.model.state_dict().values()]
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        return repr((values, self.optimizer.extra, groups))


def make_run(directory: Path) -> None:
    """Make a run of two generations, in small files that are copied in no time."""
    directory.mkdir(parents=True)
    run = Run(directory)
    run.train(2)
    run.optimizer.snapshot("two")
    run.train(1)
    run.optimizer.commit()
    run.optimizer.close()


def resume(directory: Path) -> str:
    """Return all that a resumed run says of itself, after two more steps and another resume."""
    run = Run(directory)
    try:
        facts: list[object] = []
        for which in ("two", None):
            facts += [run.optimizer.resume(which), run.facts()]
        run.train(2)
        run.optimizer.commit()
        facts += [run.optimizer.resume(), run.facts()]
    finally:
        run.optimizer.close()
    return repr(facts)


def redigest(connection: sqlite3.Connection) -> None:
    """Make every hash, digest and seal that of the rows as they are."""
    (run,) = connection.execute("SELECT value FROM meta WHERE key = 'run'").fetchone() or ("",)
    for layout, body in connection.execute("SELECT layout, body FROM layouts").fetchall():
        if isinstance(body, str):
            row = (hashlib.sha256(body.encode()).hexdigest(), layout)
            connection.execute("UPDATE layouts SET hash = ? WHERE layout IS ?", row)
    found = connection.execute(
        "SELECT generation, step, created, hyper, extra, chunks, bytes, body"
        " FROM generations LEFT JOIN layouts USING (layout)"
    ).fetchall()
    for number, *row, body in found:
        chunks = connection.execute(
            "SELECT chunk, file, offset, nbytes, blank, checksums, weight_checksums FROM chunks"
            " WHERE generation IS ? ORDER BY chunk",
            (number,),
        )
        tensors = connection.execute(
            "SELECT kind, name, dtype, shape, file, offset, nbytes, checksum FROM tensors"
            " WHERE generation IS ? ORDER BY kind, name",
            (number,),
        )
        digest = _digest(run, number, row, str(body), chunks, tensors)
        connection.execute(
            "UPDATE generations SET digest = ? WHERE generation IS ?", (digest, number)
        )
    names = connection.execute("SELECT name, generation FROM snapshots").fetchall()
    for name, number in names:
        row = (digest_of([(run, name, number)]), name)
        connection.execute("UPDATE snapshots SET digest = ? WHERE name IS ?", row)
    seal = "INSERT OR REPLACE INTO meta VALUES ('seal', ?)"
    connection.execute(seal, (seal_of(connection),))


def alterations(golden: Path) -> list[tuple[str, bool, Change]]:
    """Return each alteration: its name, whether its result may be another, and the deed."""
    connection = sqlite3.connect(f"file:{golden / MANIFEST}?mode=ro", uri=True)
    found: list[tuple[str, bool, Change]] = []
    for table in ("meta", "files", "layouts", "generations", "chunks", "tensors", "snapshots"):
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        rows = connection.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608
        for row in dict.fromkeys(rows if table == "meta" else (rows[0], rows[-1])):
            found += _of_row(table, columns, row)
    connection.close()
    return found


def _of_row(
    table: str, columns: list[str], row: tuple[Any, ...]
) -> Iterator[tuple[str, bool, Change]]:
    match = " AND ".join(f"{name} IS ?" for name in columns)
    where = f"{table} {[v for v in row if type(v) in {int, str}][:2]}"[:60]

    def put(column: str, value: object) -> Change:
        statement = f"UPDATE {table} SET {column} = ? WHERE {match}"  # noqa: S608
        return lambda connection: void(connection.execute(statement, (value, *row)))

    def delete(connection: sqlite3.Connection) -> None:
        connection.execute(f"DELETE FROM {table} WHERE {match}", row)  # noqa: S608
        connection.execute(COUNTED)

    yield f"{where}: no such row", table == "snapshots", delete
    for column, before in zip(columns, row, strict=True):
        is_free = column in FREE or (table == "meta" and row[0] == "writer")
        for value in CELLS:
            if repr(value) != repr(before):
                yield f"{where}: {column} = {repr(value)[:40]}", is_free, put(column, value)
        if column == "body" or (column in {"hyper", "extra", "shape"} and row[0] != 1):
            for path, text in _texts(json.loads(before)):
                is_free = any(part in FREE for part in (column, *map(str, path)))
                yield f"{where}: {column} {path} {text[-60:]}", is_free, put(column, text)


def _texts(value: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:  # noqa: ANN401
    """Yield every place in a JSON value, and texts in which something else is there."""
    for path in _paths(value):
        for leaf in LEAVES:
            whole = copy.deepcopy(value)
            if not path:
                whole = leaf
            else:
                _at(whole, path[:-1])[path[-1]] = leaf
            yield path, json.dumps(whole, separators=(",", ":"))
        if path:
            whole = copy.deepcopy(value)
            del _at(whole, path[:-1])[path[-1]]
            yield path, json.dumps(whole, separators=(",", ":"))
            if isinstance(path[-1], int):
                whole = copy.deepcopy(value)
                within = _at(whole, path[:-1])
                within.insert(path[-1], within[path[-1]])
                yield path, json.dumps(whole, separators=(",", ":"))


def _paths(value: Any) -> Iterator[tuple[str | int, ...]]:  # noqa: ANN401
    yield ()
    if isinstance(value, dict):
        keys: list[str | int] = list(value)
    elif isinstance(value, list) and value:
        keys = list(dict.fromkeys((0, len(value) - 1)))
    else:
        return
    for key in keys:
        for rest in _paths(value[key]):
            yield (key, *rest)


def _at(value: Any, path: tuple[str | int, ...]) -> Any:  # noqa: ANN401
    for key in path:
        value = value[key]
    return value


def void(_: object) -> None:
    """Drop a result."""


def attempt(golden: Path, place: Path, change: Change) -> str:
    """Return what comes of one alteration: an error's name, what the run says, or what is wrong."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(golden, place)
    (place / COPY_NAME).unlink()  # else it is in the place of a manifest that cannot be
    connection = sqlite3.connect(place / MANIFEST, isolation_level=None)
    try:
        before = connection.total_changes
        change(connection)
        if connection.total_changes == before:
            return "nothing"
        redigest(connection)
    except sqlite3.IntegrityError:
        return "nothing"
    finally:
        connection.close()
    out = place.with_name("outcome")
    child = os.fork()
    if child == 0:
        _answer(place, out)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return out.read_text() if code == 0 else f"WRONG: exit {code}"


def _answer(place: Path, out: Path) -> None:
    """Resume; write what came of it, and end the process."""
    signal.alarm(60)
    try:
        out.write_text(resume(place))
    except StowError as error:
        out.write_text(f"{type(error).__name__}: {error}")
    except BaseException:  # noqa: BLE001  # that is the finding
        out.write_text(f"WRONG: {traceback.format_exc()[-600:]}")
    finally:
        os._exit(0)


def outcomes(place: Path, count: int, seed: int) -> list[tuple[str, str]]:
    """Try ``count`` alterations in ``place``, which is empty; return each and what came of it.

    In a process of its own, which has no threads that a fork would lose.
    """
    place.mkdir(exist_ok=True)
    run = children.run("-m", "attacks.rows", place, str(count), str(seed), timeout=3600)
    return [tuple(json.loads(line)) for line in run.stdout.splitlines()]


def main(place: Path, count: int, seed: int) -> None:
    """Try ``count`` alterations (0: all); print each and what came of it."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    golden = place / "golden"
    space.GROWTH_BYTES = 1 << 16
    make_run(golden)
    shutil.copytree(golden, place / "same")
    wanted = resume(place / "same")
    everything = alterations(golden)
    dice = random.Random(seed)  # noqa: S311
    chosen = dice.sample(everything, count) if count else everything
    for name, is_free, change in chosen:
        found = attempt(golden, place / "it", change)
        if found not in {"nothing", wanted} and found.startswith("["):
            found = "another run" if is_free else f"WRONG: another result: {found[:200]}"
        print(json.dumps([name, "the same" if found == wanted else found]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
