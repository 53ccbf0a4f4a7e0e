from pathlib import Path

import pytest

from command_line import CommandLine
from powerloss.contents import make_content
from tensorstow.io.engine import open_engine
from tensorstow.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Store.open([tmp_path], open_engine()) as opened:
        opened.commit(make_content(opened, 7))
        opened.add_snapshot("seven")
    (tmp_path / "notes.txt").touch()
    return tmp_path


def test_it_only_says_what_it_would_do(store: Path, cli: CommandLine) -> None:
    before = sorted(store.iterdir())
    said = cli("run", "clean", store)
    assert sorted(store.iterdir()) == before
    assert "committed steps 7 (seven)" in said
    assert f"would remove {store / 'states-0.bin'}" in said
    assert f"left alone, not this run's: {store / 'notes.txt'}" in said
    assert "add --yes" in said


def test_it_does_it_when_told(store: Path, cli: CommandLine) -> None:
    assert f"removed {store / 'manifest.sqlite'}" in cli("run", "clean", "--yes", store)
    assert [path.name for path in store.iterdir()] == ["notes.txt"]


def test_a_live_run_is_refused(store: Path, cli: CommandLine) -> None:
    with Store.open([store], open_engine()):
        assert "End that first" in cli("run", "clean", "--yes", store, status=2)
    assert (store / "states-0.bin").exists()


def test_a_run_of_ranks_goes_as_a_whole_or_not_at_all(tmp_path: Path, cli: CommandLine) -> None:
    ranks = [tmp_path / f"rank-{rank}-of-2" for rank in range(2)]
    for directory in ranks:
        directory.mkdir()
        Store.open([directory], open_engine()).close()
    with Store.open([ranks[1]], open_engine()):
        cli("run", "clean", "--yes", tmp_path, status=2)
    assert (ranks[0] / "manifest.sqlite").exists()
    assert "rank-1-of-2" in cli("run", "clean", "--yes", tmp_path)
    assert [list(directory.iterdir()) for directory in ranks] == [[], []]


def test_json_says_the_same(store: Path, cli: CommandLine) -> None:
    for yes in ([], ["--yes"]):
        facts = cli.json("run", "clean", *yes, store)
        assert facts["removed"] == bool(yes)
        assert facts["generations"][0]["names"] == ["seven"]
        assert str(store / "states-0.bin") in facts["files"]
        assert facts["foreign"] == [str(store / "notes.txt")]
        assert facts["nbytes"] > 0
    assert not (store / "states-0.bin").exists()
