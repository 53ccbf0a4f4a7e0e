"""A damaged manifest is made anew of what in it is whole, when its owner says so."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from attacks.flips import (
    COPIES,
    DATA,
    ENGINE,
    LOG,
    MANIFEST,
    change_rows,
    copy,
    damage_heads,
    directories,
    drop_copy,
    facts,
    make_run,
)
from powerloss.contents import SHAPE, commit, damages_in
from tensorstow.base.errors import DamageError, LockedError, StoreFormatError
from tensorstow.store.manifest_copy import DAMAGED_NAME
from tensorstow.store.recovery import Recovery, hold_recovery, recover
from tensorstow.store.store import Store


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("golden")
    make_run(root / "rest", root / "live")
    for state in ("rest", "live"):
        drop_copy(root / state)  # else it is in the place of a damaged one
    return {"rest": root / "rest", "live": root / "live"}


def recovered(root: Path) -> tuple[list[int], list[str]]:
    """Recover, and return the steps and names that are there then; the run goes on."""
    with pytest.raises(DamageError, match="tensorstow run recover"):
        Store.open(directories(root), ENGINE)
    with hold_recovery(directories(root)) as found:
        assert found.damage is not None
        recover(found)
    with Store.open(directories(root), ENGINE) as store:
        kept = store.generations()
        assert damages_in(store) == []
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


def test_heads_that_are_all_damaged_lose_nothing_of_a_whole_manifest(
    golden: dict[str, Path], tmp_path: Path
) -> None:
    copy(golden["rest"], tmp_path / "run")
    damage_heads(tmp_path / "run")
    assert damage_of(tmp_path / "run").lost == ()
    assert recovered(tmp_path / "run") == ([2, 4, 7], ["step-2", "step-4"])


def test_a_manifests_list_says_what_was_reported_if_no_head_does(
    golden: dict[str, Path], tmp_path: Path
) -> None:
    copy(golden["rest"], tmp_path / "run")
    damage_heads(tmp_path / "run")
    change_rows(tmp_path / "run" / MANIFEST, "UPDATE chunks SET offset = 1 WHERE generation = 7")
    lost = damage_of(tmp_path / "run").lost
    assert lost == ("generation 7 (step 7), the newest that was reported",)
    change_rows(tmp_path / "run" / MANIFEST, "DELETE FROM generations WHERE generation = 7")
    reported, names = damage_of(tmp_path / "run").lost
    assert "what was reported is unknown" in reported
    assert "names of snapshots are unknown" in names


@pytest.mark.parametrize("statement", ["DELETE FROM snapshots", "UPDATE snapshots SET name = 'x'"])
def test_generations_keep_a_name_if_theirs_may_be_lost(statement: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, tmp_path / "live")
    for path in (root / MANIFEST, root / COPIES[0]):
        change_rows(path, f"{statement} WHERE generation = 4")
    with pytest.raises(DamageError):
        Store.open(directories(root), ENGINE)
    with hold_recovery(directories(root)) as found:
        assert ["names of snapshots are unknown" in lost for lost in found.lost] == [True]
        recover(found)
    with Store.open(directories(root), ENGINE) as store:
        commit(store, 50)
        kept = {s.number: s.names for s in store.generations()}
        assert damages_in(store) == []
    assert {2: ("step-2",), 4: ("recovered-4",), 7: ("recovered-7",)}.items() <= kept.items()


def test_a_name_that_only_a_lost_log_had_may_be_lost(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, tmp_path / "live")
    older = [(path, path.read_bytes()) for path in (root / MANIFEST, root / COPIES[0])]
    with Store.open(directories(root), ENGINE) as store:
        store.add_snapshot("last")
    for path, content in older:
        path.write_bytes(content)
    assert ["names of snapshots are unknown" in lost for lost in damage_of(root).lost] == [True]


def test_names_are_those_of_the_manifest_that_has_its_seal(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, tmp_path / "live")
    change_rows(root / MANIFEST, "DELETE FROM snapshots")
    change_rows(root / COPIES[0], "UPDATE chunks SET offset = 1 WHERE generation = 7")
    assert damage_of(root).lost == ()
    assert recovered(root) == ([2, 4, 7], ["step-2", "step-4"])


def test_a_manifest_that_is_gone(golden: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(golden["rest"] / "a", tmp_path / "a")
    (tmp_path / "a" / "manifest.sqlite").unlink()
    with pytest.raises(StoreFormatError, match="2 directories: only directories that"):
        hold_recovery([tmp_path / "a"]).__enter__()


def test_what_is_well_and_what_lives(golden: dict[str, Path], tmp_path: Path) -> None:
    copy(golden["rest"], tmp_path / "run")
    with Store.open(directories(tmp_path / "run"), ENGINE), pytest.raises(LockedError):
        hold_recovery(directories(tmp_path / "run")).__enter__()
    with hold_recovery(directories(tmp_path / "run")) as found:
        assert (found.damage, len(found.whole), found.lost) == (None, 3, ())
    with pytest.raises(StoreFormatError, match=r"no states-0\.bin"):
        hold_recovery([tmp_path]).__enter__()


@pytest.mark.parametrize("version", [1, 3])
def test_a_run_of_another_format_is_left_as_it_is(
    golden: dict[str, Path], version: int, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    copy(golden["rest"], root)
    connection = sqlite3.connect(root / MANIFEST, isolation_level=None)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    places = [root / MANIFEST, *(root / data for data in DATA)]
    before = [place.read_bytes() for place in places]
    # Whole for the version that wrote it, whose states may lie where this one has its heads.
    with pytest.raises(StoreFormatError, match=f"store format {version}"):
        hold_recovery(directories(root)).__enter__()
    assert [place.read_bytes() for place in places] == before
    assert not (root / "a" / DAMAGED_NAME).exists()


def damage_of(root: Path) -> Recovery:
    with hold_recovery(directories(root)) as found:
        return found


def flip_data(root: Path, number: int) -> None:
    """Change a byte of the weights of a generation's first chunk."""
    with Store.open(directories(root), ENGINE) as store:
        (extent,) = {
            store.load(s).chunks[0].extent for s in store.generations() if s.number == number
        }
        path = store.files[extent.file].path
    with path.open("r+b") as file:
        file.seek(extent.offset + SHAPE.weight_offset)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    ("number", "lost"),
    [
        (7, ("generation 7 (step 7), the newest that was reported",)),
        (4, ("snapshot 'step-4' (generation 4)",)),
    ],
)
def test_bytes_that_are_damaged_under_a_whole_manifest(
    number: int, lost: tuple[str, ...], golden: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    copy(golden["rest"], root)
    flip_data(root, number)
    with hold_recovery(directories(root)) as found:
        assert "chunk 0, weights of elements 0 to 1023 differ" in str(found.damage)
        assert [g.number for g in found.damaged] == [number]
        assert [g.number for g in found.whole] == [n for n in (2, 4, 7) if n != number]
        assert found.lost == lost
        recover(found)
    assert damage_of(root).damage is None
    with Store.open(directories(root), ENGINE) as store:
        assert [s.number for s in store.generations()] == [n for n in (2, 4, 7) if n != number]
        assert damages_in(store) == []


@pytest.mark.parametrize("name", [MANIFEST, LOG])
@pytest.mark.parametrize("offset", [20, 50, 63, 5000])
def test_the_copy_has_what_the_manifest_lost(name: str, offset: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(tmp_path / "rest", root)
    copy(root, tmp_path / "golden")
    wanted = facts(tmp_path / "golden")
    with (root / name).open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    with hold_recovery(directories(root)) as found:
        assert found.lost == ()
        assert [g.number for g in found.whole] == [2, 4, 7]
        if found.damage is not None:
            recover(found)
    assert facts(root) == wanted


def test_what_one_lost_is_looked_for_in_the_other(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, tmp_path / "live")
    for path, number in ((root / MANIFEST, 7), (root / COPIES[0], 4)):
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("UPDATE chunks SET offset = 1 WHERE generation = ?", (number,))
        connection.close()
    with pytest.raises(DamageError):
        Store.open(directories(root), ENGINE)
    with hold_recovery(directories(root)) as found:
        assert [g.number for g in found.whole] == [2, 4, 7]
        assert found.lost == ()
        recover(found)
    with Store.open(directories(root), ENGINE) as store:
        assert [name for s in store.generations() for name in s.names] == ["step-2", "step-4"]


def test_a_recovered_run_has_a_copy_again(golden: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "run"
    copy(golden["rest"], root)
    flip_data(root, 4)
    drop_copy(root)
    with hold_recovery(directories(root)) as found:
        recover(found)
    wanted = [2, 7]
    (root / MANIFEST).unlink()
    with Store.open(directories(root), ENGINE) as store:
        assert [s.number for s in store.generations()] == wanted
