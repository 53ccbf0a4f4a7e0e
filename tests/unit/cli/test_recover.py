import json
from pathlib import Path

import pytest
import torch

from attacks.flips import (
    COPIES,
    LOG,
    MANIFEST,
    change_rows,
    copy,
    damage_heads,
    directories,
    drop_copy,
    make_run,
)
from command_line import CommandLine
from powerloss.contents import commit
from tensorstow import AdamW
from tensorstow.base.errors import DamageError
from tensorstow.cli.recover import LOST
from tensorstow.cli.scrub import DAMAGED
from tensorstow.io.engine import open_engine
from tensorstow.store.store import Store


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("golden")
    make_run(root / "rest", root / "live")
    return {"rest": root / "rest", "live": root / "live"}


def recover(cli: CommandLine, root: Path, *options: str, status: int = 0) -> str:
    return cli("run", "recover", *directories(root), *options, status=status)


def test_a_run_that_is_whole_is_read(golden: dict[str, Path], cli: CommandLine) -> None:
    assert "all was read, and nothing is damaged" in recover(cli, golden["rest"], "--yes")


def test_a_manifest_whose_copy_is_whole_loses_nothing(
    golden: dict[str, Path], tmp_path: Path, cli: CommandLine
) -> None:
    root = tmp_path / "run"
    copy(golden["live"], root)
    (root / LOG).write_bytes(b"")
    before = (root / MANIFEST).read_bytes()
    said = recover(cli, root, status=DAMAGED)
    assert "it has lost what was reported" in said
    assert "generation 7 (step 7)" in said
    assert "\nlost:" not in said
    assert "add --yes to go on, which loses nothing that was reported" in said
    assert (root / MANIFEST).read_bytes() == before
    assert "the run goes on from what is whole" in recover(cli, root, "--yes")
    recover(cli, root)


def test_steps_are_lost_only_if_that_is_accepted(
    golden: dict[str, Path], tmp_path: Path, cli: CommandLine
) -> None:
    root = tmp_path / "run"
    copy(golden["live"], root)
    drop_copy(root)
    (root / LOG).unlink()
    before = (root / MANIFEST).read_bytes()
    for options in ([], ["--yes"], ["--json"]):
        said = recover(cli, root, *options, status=DAMAGED)
        assert "generation 7 (step 7), the newest that was reported" in said
        assert (root / MANIFEST).read_bytes() == before
        with pytest.raises(DamageError):  # and stays known
            Store.open(directories(root), open_engine("threads"))
    newest, names = json.loads(said)["lost"]
    assert newest == "generation 7 (step 7), the newest that was reported"
    assert "names of snapshots are unknown" in names
    assert "a new run begins there" in recover(cli, root, "--accept-loss", status=LOST)
    recover(cli, root)
    with Store.open(directories(root), open_engine("threads")) as store:
        assert store.generation() is None


def test_a_copy_that_is_damaged_alone_is_made_anew(
    golden: dict[str, Path], tmp_path: Path, cli: CommandLine
) -> None:
    root = tmp_path / "run"
    copy(golden["rest"], root)
    change_rows(root / COPIES[0], "UPDATE chunks SET offset = offset + 4096 WHERE generation = 7")
    first, before = str(root / "a"), (root / MANIFEST).read_bytes()
    for _ in range(2):
        assert "manifest-copy.sqlite, the second copy of the manifest, is damaged" in (
            said := cli("run", "scrub", first, status=DAMAGED).replace("\n", "")
        )
        assert "1 damaged" in said
        facts = cli.json("run", "scrub", first, status=DAMAGED)
        assert "generation 7" in facts["copy_damage"]
        assert "add --yes to go on, which loses nothing" in recover(cli, root, status=DAMAGED)
    assert "the second copy of the manifest is made anew" in recover(cli, root, "--yes")
    assert (root / MANIFEST).read_bytes() == before
    cli("run", "scrub", first)
    recover(cli, root)
    (root / MANIFEST).unlink()
    with Store.open(directories(root), open_engine("threads")) as store:
        assert [s.number for s in store.generations()] == [2, 4, 7]


def test_what_no_file_records_may_be_lost(
    golden: dict[str, Path], tmp_path: Path, cli: CommandLine
) -> None:
    root = tmp_path / "run"
    copy(golden["rest"], root)
    for path in (root / "a").glob("manifest*"):
        path.unlink()
    damage_heads(root)
    assert "lost: what was reported is unknown" in recover(cli, root, "--yes", status=DAMAGED)
    assert not (root / MANIFEST).exists()
    recover(cli, root, "--accept-loss", status=LOST)


def test_training_does_not_begin_anew_over_a_damaged_run(tmp_path: Path, cli: CommandLine) -> None:
    weight = torch.nn.Parameter(torch.ones(5000))

    def make() -> AdamW:
        return AdamW([weight], states="disk", dir=tmp_path, commit_every=1)

    optimizer = make()
    for _ in range(3):
        weight.grad = torch.ones(5000)
        optimizer.step()
    optimizer.close()
    with Store.open([tmp_path], open_engine("threads")) as store:
        generation = store.generation()
    assert generation is not None
    with (tmp_path / "states-0.bin").open("r+b") as file:
        file.seek(generation.chunks[0].extent.offset + 5)
        file.write(b"?")
    cli("run", "scrub", tmp_path, status=DAMAGED)
    assert "chunk 0, states of elements" in cli("run", "recover", tmp_path, status=DAMAGED)
    assert "add --accept-loss to begin anew" in cli(
        "run", "recover", tmp_path, "--yes", status=DAMAGED
    )
    optimizer = make()
    assert optimizer.resume() == 3
    weight.grad = torch.ones(5000)

    def go_on() -> None:
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(DamageError):  # where they are read
        go_on()
    optimizer.close()


def test_the_ranks_of_a_run_are_recovered_together_or_not_at_all(
    tmp_path: Path, cli: CommandLine
) -> None:
    ranks = [tmp_path / f"rank-{rank}-of-2" for rank in range(2)]
    for directory in ranks:
        directory.mkdir()
        with Store.open([directory], open_engine("threads")) as store:
            commit(store, 1)
        (directory / "manifest.sqlite").write_bytes(b"")
    (ranks[1] / "manifest-copy.sqlite").unlink()
    cli("run", "recover", tmp_path, "--yes", status=DAMAGED)
    assert [(directory / "manifest.sqlite").stat().st_size for directory in ranks] == [0, 0]
    said = cli("run", "recover", tmp_path, "--accept-loss", status=LOST)
    assert said.count("the run goes on from what is whole") == 1
    assert said.count("a new run begins there") == 1
    cli("run", "recover", tmp_path)
