"""A damaged manifest is made anew of what in it is whole, when its owner says so."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from attacks.flips import DATA, ENGINE, LOG, MANIFEST, copy, directories, facts, make_run
from powerloss.contents import commit
from tensorstow.base.errors import DamageError, LockedError, StoreFormatError
from tensorstow.cli.main import main
from tensorstow.store.recovery import DAMAGED_NAME, hold_recovery, recover
from tensorstow.store.scrub import scrub
from tensorstow.store.store import Store


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("golden")
    make_run(root / "rest", root / "live")
    return {"rest": root / "rest", "live": root / "live"}


def recovered(root: Path) -> tuple[list[int], list[str]]:
    """Recover, and return the steps and names that are there then; the run goes on."""
    with pytest.raises(DamageError, match="tensorstow recover"):
        Store.open(directories(root), ENGINE)
    with hold_recovery(directories(root)) as found:
        assert found.damage is not None
        recover(found)
    with Store.open(directories(root), ENGINE) as store:
        kept = store.generations()
        assert [d for progress in scrub(store) for d in progress.found] == []
        commit(store, 50)
        assert store.generations()[-1].number > 7  # no number is used twice
    facts(root)
    return [s.step for s in kept], [name for s in kept for name in s.names]


def test_a_lost_log(golden: dict[str, Path], tmp_path: Path) -> None:
    copy(golden["live"], tmp_path / "run")
    log = tmp_path / "run" / LOG
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    steps, names = recovered(tmp_path / "run")
    assert (steps, names) == ([2], ["step-2"])  # step 3 was there too, and is written over
    assert (tmp_path / "run" / "a" / f"{DAMAGED_NAME}-wal").exists()


def test_one_generation_of_several(golden: dict[str, Path], tmp_path: Path) -> None:
    copy(golden["rest"], tmp_path / "run")
    connection = sqlite3.connect(tmp_path / "run" / MANIFEST, isolation_level=None)
    connection.execute("UPDATE chunks SET offset = offset + 4096 WHERE generation = 7 AND chunk=0")
    connection.close()
    with pytest.raises(DamageError) as caught:
        Store.open(directories(tmp_path / "run"), ENGINE)
    assert "the records of generation 7 are not those that were written" in str(caught.value)
    assert "whole are generation 2 (step 2, 'step-2'), generation 4 (step 4, 'st" in str(
        caught.value
    )
    assert recovered(tmp_path / "run") == ([2, 4], ["step-2", "step-4"])


def test_heads_that_are_damaged_lose_nothing(golden: dict[str, Path], tmp_path: Path) -> None:
    copy(golden["rest"], tmp_path / "run")
    with (tmp_path / "run" / DATA[1]).open("r+b") as file:
        file.seek(4096)
        file.write(b"\0" * 8192)
    assert recovered(tmp_path / "run") == ([2, 4, 7], ["step-2", "step-4"])


def test_a_manifest_that_is_gone(golden: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(golden["rest"] / "a", tmp_path / "a")
    (tmp_path / "a" / "manifest.sqlite").unlink()
    with pytest.raises(StoreFormatError, match="2 directories, and its man"):
        hold_recovery([tmp_path / "a"]).__enter__()


def test_where_nothing_is_whole_a_new_run_begins(
    golden: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy(golden["rest"], tmp_path / "run")
    (tmp_path / "run" / MANIFEST).write_bytes(b"")
    place = [str(directory) for directory in directories(tmp_path / "run")]
    assert main(["recover", *place]) == 0
    assert "add --yes to begin anew" in capsys.readouterr().out
    assert main(["recover", *place, "--yes"]) == 0
    assert "a new run begins there" in capsys.readouterr().out
    with Store.open(directories(tmp_path / "run"), ENGINE) as store:
        assert store.generation() is None


def test_what_is_well_and_what_lives(golden: dict[str, Path], tmp_path: Path) -> None:
    copy(golden["rest"], tmp_path / "run")
    with Store.open(directories(tmp_path / "run"), ENGINE), pytest.raises(LockedError):
        hold_recovery(directories(tmp_path / "run")).__enter__()
    with hold_recovery(directories(tmp_path / "run")) as found:
        assert (found.damage, len(found.whole), found.has_newest) == (None, 3, True)
    with pytest.raises(StoreFormatError, match=r"no states-0\.bin"):
        hold_recovery([tmp_path]).__enter__()


def test_the_command(
    golden: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    copy(golden["live"], root)
    (root / LOG).unlink()
    before = (root / MANIFEST).read_bytes()
    with pytest.raises(StoreFormatError, match="Name all of them"):  # of a copy
        hold_recovery([root / "a"]).__enter__()
    with Store.open(directories(golden["rest"]), ENGINE), pytest.raises(LockedError):
        hold_recovery([golden["rest"] / "a"]).__enter__()
    place = [str(directory) for directory in directories(root)]
    assert main(["recover", *place]) == 0
    said = capsys.readouterr().out
    assert "lost: generation 7 (step 7), the newest that was reported" in said
    assert "add --yes" in said
    assert (root / MANIFEST).read_bytes() == before
    assert main(["recover", *place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["newest"] == {"generation": 7, "step": 7}
    assert main(["recover", *place, "--yes"]) == 0
    assert "a new run begins there" in capsys.readouterr().out
    assert main(["recover", *place]) == 0
    assert "nothing is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("version", [1, 3])
def test_a_run_of_another_format_is_left_as_it_is(
    golden: dict[str, Path], version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    copy(golden["rest"], root)
    connection = sqlite3.connect(root / MANIFEST, isolation_level=None)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    places = [root / MANIFEST, *(root / data for data in DATA)]
    before = [place.read_bytes() for place in places]
    # Whole for the version that wrote it, whose states may lie where this one has its heads.
    assert main(["recover", *map(str, directories(root)), "--yes"]) == 2
    assert f"store format {version}" in capsys.readouterr().err
    assert [place.read_bytes() for place in places] == before
    assert not (root / "a" / DAMAGED_NAME).exists()
