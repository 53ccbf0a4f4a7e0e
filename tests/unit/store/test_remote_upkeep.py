"""Copies elsewhere are checked, and cleaned without harm to pushes that are under way."""

import json
import threading
import time
from itertools import product
from pathlib import Path

import pytest

from pushed import is_same, names_in, trained
from tensorstow.base.errors import LockedError, OptionError, RemoteError
from tensorstow.base.machine import process_id
from tensorstow.cli.main import main
from tensorstow.store import remote_marks
from tensorstow.store.remote import Remote
from tensorstow.store.remote_marks import clean_marked, marks, push_marked
from tensorstow.store.remote_upkeep import clean_remote, find_unlisted, scrub_remote


@pytest.fixture
def pushed(tmp_path: Path, url: str) -> str:
    """Push two snapshots of a run, which share the frozen weights."""
    trained(tmp_path / "run", "one", "two")
    for name in ("one", "two"):
        assert main(["run", "push", str(tmp_path / "run"), url, "--snapshot", name]) == 0
    return url


def objects_of(url: str, name: str) -> set[str]:
    listed = json.loads(Remote(url).get(f"snapshots/{name}/rank-0-of-1.json") or b"")
    return {entry["object"] for entry in (*listed["chunks"], *listed["tensors"])}


def mark_of_another_machine(url: str, path: str, **more: object) -> None:
    body = {"machine": ["far", "boot", "pids"], "pid": 7, "began": "1", "since": "then", **more}
    Remote(url).put(path, json.dumps(body).encode())


def mark_of_a_dead_process(url: str, path: str) -> None:
    body = {**process_id(), "began": "before", "since": "then"}
    Remote(url).put(path, json.dumps(body).encode())


# --- scrub ---


def test_all_copies_are_as_written(pushed: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["run", "scrub", pushed, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["damages"] == []
    sizes = Remote(pushed).list("objects")
    assert facts["read_bytes"] == sum(sizes.values()) > 0  # each is read once, though both list it


def test_each_object_that_is_missing_or_damaged_is_named(
    pushed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there = Remote(pushed)
    only_one = min(objects_of(pushed, "one") - objects_of(pushed, "two"))
    shared = min(objects_of(pushed, "one") & objects_of(pushed, "two"))
    data = there.get(f"objects/{shared}") or b""
    there.put(f"objects/{shared}", bytes([data[0] ^ 1]) + data[1:])
    there.remove(f"objects/{only_one}")
    capsys.readouterr()
    assert main(["run", "scrub", pushed]) == 1
    said = capsys.readouterr().out
    assert f"{only_one} is missing (snapshot one)" in said
    assert f"{shared}: it is not as it was written" in said
    assert "(snapshot one, two)" in said
    assert "2 damaged" in said
    assert main(["run", "scrub", pushed, "--generation=two", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["damages"]) == 1


def test_a_list_that_is_damaged_is_one_damage_and_others_are_read(pushed: str) -> None:
    Remote(pushed).put("snapshots/one/rank-0-of-1.json", b"{}")
    reports = list(scrub_remote(Remote(pushed)))
    (damage,) = [damage for report in reports for damage in report.damages]
    assert damage.snapshots == ("one",)
    assert "rank-0-of-1.json cannot be read" in damage.description
    assert reports[-1].done_bytes == reports[-1].total_bytes > 0
    with pytest.raises(OptionError, match=r"does not have it\. It has: one, two"):
        list(scrub_remote(Remote(pushed), "three"))


def test_an_unfinished_snapshot_is_named(pushed: str, capsys: pytest.CaptureFixture[str]) -> None:
    Remote(pushed).remove("snapshots/two.json")
    assert main(["run", "scrub", pushed]) == 0
    assert "two is not complete: it has rank-0-of-1.json alone" in capsys.readouterr().out


# --- clean ---


def test_objects_that_no_snapshot_lists_are_removed(
    pushed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, before = Remote(pushed), names_in(pushed)
    there.put(f"objects/{'0' * 64}", b"left by a push that was killed")
    there.put("objects/README", b"somebody's")
    there.put("snapshots/three.json.0a1b.part", b"{")
    assert main(["run", "clean", pushed]) == 0
    said = capsys.readouterr().out
    assert f"would remove {there.url}/objects/{'0' * 64}" in said
    assert f"left alone, no object of a snapshot: {there.url}/objects/README" in said
    assert "nothing was touched" in said
    assert names_in(pushed) == before | {"0" * 64, "README"}
    assert main(["run", "clean", pushed, "--yes"]) == 0
    assert names_in(pushed) == before | {"README"}
    assert not any(name.endswith(".part") for name in names_in(pushed, "snapshots"))
    assert names_in(pushed, "cleans") == set()
    assert main(["run", "pull", pushed, str(tmp_path / "back")]) == 0


def test_a_snapshot_is_removed_and_what_others_list_stays(
    pushed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "clean", pushed, "--snapshot=three", "--yes"]) == 2
    assert "does not have it. It has: one, two" in capsys.readouterr().err
    assert main(["run", "clean", pushed, "--snapshot=one", "--yes", "--json"]) == 0
    removal = json.loads(capsys.readouterr().out)
    assert removal["snapshots"] == ["one"]
    assert removal["files"] == ["snapshots/one.json", "snapshots/one/rank-0-of-1.json"]
    assert names_in(pushed) == objects_of(pushed, "two")
    assert names_in(pushed, "snapshots") == {"two.json", "two/rank-0-of-1.json"}
    assert main(["run", "pull", pushed, str(tmp_path / "back")]) == 0
    assert main(["run", "push", str(tmp_path / "run"), pushed, "--snapshot=one"]) == 0
    assert main(["run", "scrub", pushed]) == 0


def test_a_list_of_a_rank_whose_others_are_not_there_yet_counts(pushed: str) -> None:
    Remote(pushed).remove("snapshots/two.json")
    assert find_unlisted(Remote(pushed)).objects == ()
    clean_remote(Remote(pushed))
    assert objects_of(pushed, "two") <= names_in(pushed)


_LISTS = ("snapshots/one.json", "snapshots/one/rank-0-of-1.json")


@pytest.mark.parametrize(
    ("path", "body"),
    [*product(_LISTS, [b"{", b"[]", b'{"format": 2}']), (_LISTS[1], None)],
)
def test_nothing_is_removed_if_a_list_cannot_be_read(
    pushed: str, path: str, body: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    there, before = Remote(pushed), names_in(pushed)
    there.remove(path)
    if body is not None:
        there.put(path, body)
    assert main(["run", "clean", pushed, "--yes"]) == 2
    said = capsys.readouterr().err
    assert "has format 2" in said or "nothing was removed" in said
    assert names_in(pushed) == before
    assert main(["run", "clean", pushed, "--yes", "--snapshot=one"]) == 0
    assert names_in(pushed) == objects_of(pushed, "two")


def test_a_clean_ends_while_a_push_is_under_way(pushed: str) -> None:
    there, garbage = Remote(pushed), "0" * 64
    there.put(f"objects/{garbage}", b"of the push")
    with push_marked(there, "three", 0, 1, commit="c", digest="d"):
        for names in ((), ("three",)):  # the process is known to be alive
            with pytest.raises(LockedError, match="snapshot 'three' is being pushed there by pid"):
                clean_remote(there, names)
        assert garbage in names_in(pushed)
        assert names_in(pushed, "cleans") == set()
    assert marks(there) == []
    clean_remote(there)
    assert garbage not in names_in(pushed)


def test_a_push_waits_for_a_clean(pushed: str, tmp_path: Path) -> None:
    there, sizes = Remote(pushed), Remote(pushed).list("objects")
    trained(tmp_path / "other", "none", "three")
    command = ["run", "push", str(tmp_path / "other"), pushed, "--snapshot=three"]
    done: list[int] = []
    with clean_marked(there):
        thread = threading.Thread(target=lambda: done.append(main(command)))
        thread.start()
        while thread.is_alive() and not names_in(pushed, "pushes"):
            time.sleep(0.01)
        # What it would have found there is removed before it looks.
        for name in sizes:
            there.remove(f"objects/{name}")
        assert names_in(pushed) == set()
    thread.join()
    assert done == [0]
    assert not [d for r in scrub_remote(there, "three") for d in r.damages]


def test_a_push_does_not_wait_for_ever(pushed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_marks, "_PAUSES", ())
    mark_of_another_machine(pushed, "cleans/a.json")
    with (
        pytest.raises(RemoteError, match=r"a clean of it by pid 7 on far since then does not end"),
        push_marked(Remote(pushed), "three", 0, 1, commit="c", digest="d"),
    ):
        raise AssertionError
    assert names_in(pushed, "pushes") == set()


def test_marks_of_processes_that_are_gone_hold_nothing_up(pushed: str, tmp_path: Path) -> None:
    mark_of_a_dead_process(pushed, "cleans/a.json")
    mark_of_a_dead_process(pushed, "pushes/three/rank-0-of-1-a.json")
    assert main(["run", "push", str(tmp_path / "run"), pushed, "--snapshot=one"]) == 0
    removal = clean_remote(Remote(pushed))
    assert removal.files == ("pushes/three/rank-0-of-1-a.json", "cleans/a.json")
    assert marks(Remote(pushed)) == []


def test_a_push_killed_elsewhere_is_given_up_or_repeated(pushed: str, tmp_path: Path) -> None:
    mark_of_another_machine(pushed, "pushes/one/rank-0-of-1-a.json")
    mark_of_another_machine(pushed, "pushes/three/rank-0-of-1-a.json")
    with pytest.raises(LockedError, match="'one' is being pushed there by pid 7 on far"):
        clean_remote(Remote(pushed))
    assert main(["run", "push", str(tmp_path / "run"), pushed, "--snapshot=one"]) == 0
    with pytest.raises(LockedError, match=r"give it up: .* --snapshot three --yes"):
        clean_remote(Remote(pushed))
    clean_remote(Remote(pushed), ["three"])
    assert marks(Remote(pushed)) == []
    assert not [d for r in scrub_remote(Remote(pushed)) for d in r.damages]


@pytest.mark.parametrize(
    ("rank", "commit", "digest"), [(0, "c", "e"), (0, "e", "d"), (1, "e", "e")]
)
def test_two_commits_are_not_pushed_by_one_name_at_once(
    pushed: str, rank: int, commit: str, digest: str
) -> None:
    there = Remote(pushed)
    with push_marked(there, "three", 0, 2, commit="c", digest="d"):
        with (
            pytest.raises(LockedError, match="another commit is being pushed there by that name"),
            push_marked(there, "three", rank, 2, commit=commit, digest=digest),
        ):
            raise AssertionError
        for other in ((0, "d"), (1, "e")):  # the same, and another rank's
            with push_marked(there, "three", other[0], 2, commit="c", digest=other[1]):
                pass
        with push_marked(there, "four", rank, 2, commit=commit, digest=digest):
            pass
    assert marks(there) == []


def test_a_push_of_another_commit_that_was_killed_elsewhere_is_given_up_first(
    pushed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "pushes/three/rank-0-of-1-a.json"
    mark_of_another_machine(pushed, path, pushed=["e of 1", "e"])
    trained(tmp_path / "other", "none", "three")
    push = ["run", "push", str(tmp_path / "other"), pushed, "--snapshot=three"]
    assert main(push) != 0
    advice = capsys.readouterr().err.partition("give its push up: tensorstow ")[2].split()
    assert main(advice) == 0
    assert main(push) == 0
    assert not [d for r in scrub_remote(Remote(pushed), "three") for d in r.damages]


def test_the_same_commit_may_be_pushed_twice_at_once(
    pushed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that ends first removes the mark of the other, whose list is there then."""
    trained(tmp_path / "other", "none", "three")
    push = ["run", "push", str(tmp_path / "other"), pushed, "--snapshot=three"]
    find, other = Remote.list, [0]

    def list_after_another(there: Remote, folder: str) -> dict[str, int]:
        if folder == "objects" and len(other) == 1:
            other.append(-1)
            other[1] = main(push)
        return find(there, folder)

    monkeypatch.setattr(Remote, "list", list_after_another)
    assert main(push) == 0
    assert other == [0, 0]
    assert marks(Remote(pushed)) == []
    assert not [d for r in scrub_remote(Remote(pushed), "three") for d in r.damages]


def test_files_of_others_do_not_hold_a_clean_up(
    pushed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there = Remote(pushed)
    foreign = ["snapshots/.DS_Store", "snapshots/one/notes.txt", "snapshots/one/more/rank.json"]
    for path in foreign:
        there.put(path, b"of another program")
    parts = [f"{f}/{n}.json.0a1b.part" for f, n in (("pushes/one", "a"), ("cleans", "b"))]
    for path in parts:
        there.put(path, b"{")
    removal = clean_remote(there)
    assert sorted(removal.foreign) == sorted(foreign)
    assert removal.files == tuple(parts)
    assert all(there.get(path) == b"of another program" for path in foreign)
    assert names_in(pushed, "pushes") == names_in(pushed, "cleans") == set()
    assert main(["run", "scrub", pushed]) == 0
    capsys.readouterr()


def test_two_cleans_are_not_under_way_at_once(pushed: str) -> None:
    with (
        clean_marked(Remote(pushed)),
        pytest.raises(LockedError, match="it is being cleaned by pid"),
    ):
        clean_remote(Remote(pushed))
    Remote(pushed).put("cleans/torn.json", b"{")
    with pytest.raises(LockedError, match="a process that its mark does not name"):
        clean_remote(Remote(pushed))


def test_a_run_and_its_copies_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = trained(tmp_path / "run", "one")
    assert main(["run", "clean", str(tmp_path / "run"), "--snapshot=one", "--yes"]) == 2
    assert "optimizer.drop(name) removes" in capsys.readouterr().err
    assert main(["run", "push", str(tmp_path / "run"), str(tmp_path / "bucket")]) == 0
    assert main(["run", "clean", str(tmp_path / "bucket"), str(tmp_path / "run"), "--yes"]) == 2
    assert "one address at a time" in capsys.readouterr().err
    assert is_same(tmp_path / "run", wanted)
