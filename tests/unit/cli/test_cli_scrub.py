from pathlib import Path

import pytest

from command_line import CommandLine
from powerloss.contents import SHAPE, make_content
from tensorstow.io.engine import open_engine
from tensorstow.store.records import ChunkRecord
from tensorstow.store.store import Store


def make_store(directory: Path) -> ChunkRecord:
    """Pin one generation and add another; return the first's first chunk."""
    with Store.open([directory], open_engine()) as store:
        old = make_content(store, 1)
        store.commit(old)
        store.add_snapshot("old")
        store.commit(make_content(store, 2))
    return old.chunks[0]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_all_is_as_written(tmp_path: Path, cli: CommandLine) -> None:
    make_store(tmp_path)
    assert "read back: all as written" in cli("run", "scrub", tmp_path)


def test_a_damage_is_named(tmp_path: Path, cli: CommandLine) -> None:
    record = make_store(tmp_path)
    at = record.extent.offset + SHAPE.weight_offset + 5
    flip(tmp_path / "states-0.bin", at)
    said = cli("run", "scrub", tmp_path, status=1)
    start = record.extent.offset + SHAPE.weight_offset
    assert f"{tmp_path}/states-0.bin, 2048 bytes at offset {start}: chunk 0, weights" in said
    assert "(generation 1)" in said
    assert "1 damaged" in said


@pytest.mark.parametrize(("which", "status"), [("old", 1), ("1", 1), ("2", 0)])
def test_one_generation(which: str, status: int, tmp_path: Path, cli: CommandLine) -> None:
    flip(tmp_path / "states-0.bin", make_store(tmp_path).extent.offset)
    cli("run", "scrub", "--generation", which, tmp_path, status=status)
    assert "There are: 1 (old), 2" in cli(
        "run", "scrub", "--generation", "never", tmp_path, status=2
    )


def test_a_live_run_is_refused(tmp_path: Path, cli: CommandLine) -> None:
    with Store.open([tmp_path], open_engine()):
        assert "is held by this process" in cli("run", "scrub", tmp_path, status=2)


def test_nothing_is_made(tmp_path: Path, cli: CommandLine) -> None:
    cli("run", "scrub", tmp_path, status=2)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written(tmp_path: Path, cli: CommandLine) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    directories = [tmp_path / "a", tmp_path / "b"]
    with Store.open(directories, open_engine()) as store:
        store.commit(make_content(store, 1))
    (tmp_path / "b" / "lock").unlink()
    files = sorted(p for d in directories for p in d.iterdir())
    before = [(p, p.read_bytes(), p.stat().st_mtime_ns) for p in files]
    cli("run", "scrub", tmp_path / "a")
    assert [(p, p.read_bytes(), p.stat().st_mtime_ns) for p in files] == before
    assert sorted(p for d in directories for p in d.iterdir()) == files


def test_a_file_of_another_run_is_not_read(tmp_path: Path, cli: CommandLine) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    Store.open([tmp_path / "a", tmp_path / "b"], open_engine()).close()
    (tmp_path / "b" / "states-1.bin").write_bytes(b"mine" * 4096)
    assert "states-1.bin" in cli("run", "scrub", tmp_path / "a", status=2)


def test_all_ranks_are_read(tmp_path: Path, cli: CommandLine) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}-of-2").mkdir()
    record = make_store(tmp_path / "rank-0-of-2")
    make_store(tmp_path / "rank-1-of-2")
    assert cli("run", "scrub", tmp_path).count("all as written") == 2
    flip(tmp_path / "rank-0-of-2" / "states-0.bin", record.extent.offset)
    first, second = cli("run", "scrub", tmp_path, status=1).splitlines()[-2:]
    assert "rank-0-of-2" in first
    assert "1 damaged" in first
    assert "rank-1-of-2" in second
    assert "all as written" in second


def test_json_says_the_same(tmp_path: Path, cli: CommandLine) -> None:
    record = make_store(tmp_path)
    whole = cli.json("run", "scrub", tmp_path)
    assert whole == {
        "directory": str(tmp_path), "read_bytes": whole["read_bytes"], "damages": [],
        "copy_damage": None,
    }  # fmt: skip
    flip(tmp_path / "states-0.bin", record.extent.offset)
    facts = cli.json("run", "scrub", tmp_path, status=1)
    assert facts["read_bytes"] == whole["read_bytes"] > 0
    (damage,) = facts["damages"]
    assert (damage["offset"], damage["generations"]) == (record.extent.offset, [1])
    assert damage["path"] == str(tmp_path / "states-0.bin")
