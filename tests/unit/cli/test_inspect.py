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
    return tmp_path


def test_it_prints_what_there_is(store: Path, cli: CommandLine) -> None:
    said = cli("run", "inspect", store)
    for words in ("by nobody", "states-0.bin", "seven", "9,000 in 3 chunks", "bytes of states"):
        assert words in said


def test_json_says_the_same(store: Path, cli: CommandLine) -> None:
    facts = cli.json("run", "inspect", store)
    (generation,) = facts["generations"]
    assert (generation["step"], generation["names"]) == (7, ["seven"])
    assert facts["files"][0]["path"] == str(store / "states-0.bin")
    assert facts["layout"]["elements"] == 9000


def test_a_live_store_may_be_looked_at(store: Path, cli: CommandLine) -> None:
    with Store.open([store], open_engine()):
        assert "by this process itself" in cli("run", "inspect", store)


def test_an_empty_store_and_a_missing_file(tmp_path: Path, cli: CommandLine) -> None:
    Store.open([tmp_path], open_engine()).close()
    (tmp_path / "states-0.bin").unlink()
    said = cli("run", "inspect", tmp_path)
    assert "is gone" in said
    assert "nothing is committed yet" in said


def test_no_store_is_an_error(tmp_path: Path, cli: CommandLine) -> None:
    assert "there is no manifest.sqlite" in cli("run", "inspect", tmp_path, status=2)


def test_the_ranks_of_a_run(tmp_path: Path, cli: CommandLine) -> None:
    for rank, step in ((0, 5), (1, 6)):
        directory = tmp_path / f"rank-{rank}-of-2"
        directory.mkdir()
        with Store.open([directory], open_engine()) as opened:
            opened.commit(make_content(opened, step))
    said = cli("run", "inspect", tmp_path)
    assert said.index("rank-0-of-2") < said.index("rank-1-of-2")
    facts = cli.json("run", "inspect", tmp_path)
    assert [rank["generations"][0]["step"] for rank in facts] == [5, 6]


def test_forty_columns_lose_nothing(
    store: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    said = cli("run", "inspect", store)
    assert str(store / "states-0.bin") in said
    for words in ("generation  1", "snapshots   seven", "chunks      3", "step        7"):
        assert words in said
