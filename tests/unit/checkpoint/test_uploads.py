"""Snapshots of several ranks elsewhere, which any number of ranks goes on from."""

from collections.abc import Callable
from pathlib import Path

from ranks.pool import Ranks
from ranks.resharded import go_on, push_while_live, snapshot_to, warnings_of_resume
from tensorstow.cli.main import main
from tensorstow.store.upload_notes import read_notes, write_note


def test_all_ranks_copy_theirs(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    url = str(tmp_path / "bucket")
    wanted, _ = ranks(2).run(snapshot_to, tmp_path / "run", url)
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    ((start, before, _),) = ranks(1).run(go_on, tmp_path / "back", 1, "two", {})
    assert (start, before) == (2, wanted)


def test_each_machine_pulls_its_rank(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    url = str(tmp_path / "bucket")
    ranks(2).run(snapshot_to, tmp_path / "run", url)
    for rank in ("0", "1"):
        assert main(["run", "pull", url, str(tmp_path / "back"), "--rank", rank]) == 0
    assert [start for start, _, _ in ranks(2).run(go_on, tmp_path / "back", 1, None, {})] == [2, 2]


def test_ranks_are_pushed_when_the_run_is_over(
    tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    url = str(tmp_path / "bucket")
    (_, _, wanted), _ = ranks(2).run(go_on, tmp_path / "run", 2, None, {})
    assert main(["run", "push", str(tmp_path / "run"), url]) == 0
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    ((start, before, _),) = ranks(1).run(go_on, tmp_path / "back", 0, None, {})
    assert (start, before) == (2, wanted)


def test_the_command_pushes_a_live_run_of_all_ranks(
    tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    url = str(tmp_path / "bucket")
    wanted, _ = ranks(2).run(push_while_live, tmp_path / "run", url)
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    ((start, before, _),) = ranks(1).run(go_on, tmp_path / "back", 0, None, {})
    assert (start, before) == (2, wanted)


def test_copies_of_ranks_that_are_no_more_are_said_with_the_command(
    tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    url, store = str(tmp_path / "bucket"), tmp_path / "run" / "rank-1-of-2"
    ranks(2).run(snapshot_to, tmp_path / "run", str(tmp_path / "other"))
    write_note(store, "two", url)
    (said,) = ranks(1).run(warnings_of_resume, tmp_path / "run")
    command = f"run push {tmp_path / 'run'} {url} --snapshot two"
    assert f"when the run of 2 ranks ended: tensorstow {command}" in said
    assert main(command.split()) == 0
    assert read_notes(store) == {}
    assert main(["run", "scrub", url]) == 0
